"""What torch was built for is read from its files; which wheel fits is told by command."""

from __future__ import annotations

import sys

import pytest
import torch

from gpumix.hardware.discovery.torch_build import (
    TorchBuild,
    parse_torch_build,
    read_torch_build,
    suggest_cuda_wheel,
    suggest_wheel,
)

VERSION_FILE = """
from typing import Optional
__all__ = ['__version__', 'cuda', 'hip', 'xpu']
__version__ = '2.13.0+{name}'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'cf30'
hip: Optional[str] = {hip}
xpu: Optional[str] = {xpu}
"""


@pytest.mark.parametrize(
    ("name", "toolkit", "version"),
    [("cu130", "CUDA", "13.0"), ("rocm7.1", "ROCm", "7.1.5"), ("xpu", "XPU", "20250301"),
     ("cpu", "", "")],
)  # fmt: skip
def test_a_build_is_read_from_its_version_file(name, toolkit, version):
    values = dict.fromkeys(("cuda", "hip", "xpu"), "None")
    values |= {{"CUDA": "cuda", "ROCm": "hip", "XPU": "xpu"}.get(toolkit, "none"): repr(version)}
    found = parse_torch_build(
        VERSION_FILE.format(name=name, **{k: values[k] for k in ("cuda", "hip", "xpu")})
    )
    assert found == TorchBuild(f"2.13.0+{name}", toolkit, version)


def test_a_file_that_is_not_torchs_tells_nothing():
    assert parse_torch_build("# made by hand") is None


def test_the_build_that_is_here(monkeypatch):
    found = read_torch_build()
    monkeypatch.delitem(sys.modules, "torch.version")
    assert read_torch_build() == found, "the same from its file, before it is imported"
    assert found.version == torch.__version__
    assert bool(found.toolkit) == any((torch.version.cuda, torch.version.hip, torch.version.xpu))


@pytest.mark.parametrize(("driver", "index"), [("12.4", "cu126"), ("13.0", "cu130"), ("", "cu130")])
def test_a_wheel_for_a_driver(driver, index):
    assert suggest_cuda_wheel(driver).endswith(
        f"--index-url https://download.pytorch.org/whl/{index}"
    )


def test_a_wheel_for_a_card():
    assert suggest_wheel("NVIDIA", (7, 0)).endswith("cu126"), "CUDA 13 has no kernels for Volta"
    assert suggest_wheel("NVIDIA", (9, 0)).endswith("cu130")
    assert suggest_wheel("Intel").endswith("/xpu")
    assert "rocmX.Y" in suggest_wheel("AMD")
