"""Build of the installed torch (GPU maker and version), read from its files. Importing torch takes
seconds, which every device query would pay."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from gpumix.schema.files import read_log

Toolkit = Literal["CUDA", "ROCm", "XPU", ""]
INSTALL_PAGE = "https://pytorch.org/get-started/locally"
_ARCH = re.compile(r"^(sm|compute)_(\d+)(\d)([a-z]?)$")
_INSTALL_COMMAND = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
)
_NAMES: tuple[tuple[str, Toolkit], ...] = (("hip", "ROCm"), ("xpu", "XPU"), ("cuda", "CUDA"))


OLDEST_CUDA = 12  # of any torch that gpumix runs with
TOOLKITS: dict[str, Toolkit] = {"NVIDIA": "CUDA", "AMD": "ROCm", "Intel": "XPU"}  # by maker


@dataclass(frozen=True)
class TorchBuild:
    """Build of the installed torch.

    Attributes:
        version: such as "2.13.0+cu130".
        toolkit: for NVIDIA GPUs "CUDA", AMD "ROCm", Intel "XPU"; empty: CPUs only.
        toolkit_version: such as "13.0".
    """

    version: str
    toolkit: Toolkit = ""
    toolkit_version: str = ""

    def __str__(self) -> str:
        built = f"{self.toolkit} {self.toolkit_version}" if self.toolkit else "CPUs only"
        return f"torch {self.version}, built for {built}"


def read_torch_build() -> TorchBuild | None:
    """Return the build in this environment; None without torch or a readable version file."""
    loaded = sys.modules.get("torch.version")
    if loaded is not None:
        return _build({k: v for k, v in vars(loaded).items() if isinstance(v, str)})
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0], "version.py")
    return parse_torch_build(read_log(file)) if file.exists() else None


def parse_torch_build(source: str) -> TorchBuild | None:
    """Return the build described by the text of `torch/version.py`."""
    values: dict[str, str] = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            values |= {one.id: value.value for one in targets if isinstance(one, ast.Name)}
    return _build(values)


def _build(values: Mapping[str, str]) -> TorchBuild | None:
    if "__version__" not in values:
        return None
    for name, toolkit in _NAMES:
        if name in values:
            return TorchBuild(values["__version__"], toolkit, values[name])
    return TorchBuild(values["__version__"])


def suggest_cuda_wheel(driver_cuda: str) -> str:
    """Return the command to install a torch for a driver supporting CUDA up to `driver_cuda`
    ("12.4"). All drivers of a major version run its wheels; empty for drivers of CUDA 11 and older,
    which run none."""
    major = driver_cuda.partition(".")[0]
    if major.isdigit() and int(major) < OLDEST_CUDA:
        return ""
    return _INSTALL_COMMAND + ("cu126" if major == "12" else "cu130")


def suggest_toolkit_wheel(toolkit: Toolkit) -> str:
    """Return the command to install a torch for the GPUs of a toolkit."""
    index = {"CUDA": "cu130", "XPU": "xpu"}.get(toolkit, "rocmX.Y")
    return (
        _INSTALL_COMMAND + index + (f" (X.Y as {INSTALL_PAGE} has it)" if toolkit == "ROCm" else "")
    )


def suggest_wheel(maker: str, capability: tuple[int, int] = (0, 0)) -> str:
    """Return the command to install a torch for the GPUs of a maker, such as "AMD". For NVIDIA, the
    wheel has kernels for the compute capability: CUDA 13 dropped Pascal and Volta."""
    if maker == "NVIDIA" and (0, 0) < capability < (7, 5):
        return _INSTALL_COMMAND + "cu126"
    return suggest_toolkit_wheel(TOOLKITS[maker])


def get_kernel_support(arches: tuple[str, ...], capability: str) -> str:
    """Return "own" if kernels exist, "made" if PTX can be compiled, "none" otherwise.

    Kernels run on equal major versions from their minor version on, PTX on all newer ones. With a
    letter suffix they run only on the exact capability or its family.
    """
    wanted = parse_version(capability)
    from_ptx = False
    for arch in arches:
        found = _ARCH.match(arch)
        if found is None:
            continue
        kind, letter = found[1], found[4]
        there = (int(found[2]), int(found[3]))
        if there == wanted and kind == "sm":
            return "own"
        if letter:
            continue
        if kind == "sm" and there[0] == wanted[0] and there[1] < wanted[1]:
            return "own"
        from_ptx |= kind == "compute" and there <= wanted
    return "made" if from_ptx else "none"


def parse_version(version: str) -> tuple[int, int]:
    """Return the major and the minor number of a version; 0 for a missing minor one."""
    parts = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return parts[0], parts[1] if len(parts) > 1 else 0
