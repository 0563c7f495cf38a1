"""Gives torch the devices while it is imported, and gpumix measurements that a CPU can do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from cuda_device.library import load


def install() -> None:
    """Load the devices when this process imports torch.

    Raises:
        RuntimeError: it has imported torch already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the CUDA device for tests comes before torch")
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torch and `torch.cuda` where they are, with loaders that do more."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _LOADERS:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _LOADERS[name](spec.loader.name, spec.loader.path)
        return spec


class _Torch(SourceFileLoader):
    """Loads the library before torch looks for the hooks of CUDA, which it does once."""

    def exec_module(self, module: ModuleType) -> None:
        load(Path(self.path).parent / "lib")
        super().exec_module(module)


class _Cuda(SourceFileLoader):
    """Puts into `torch._C`, before `torch.cuda` looks for it, what a build with CUDA has there."""

    def exec_module(self, module: ModuleType) -> None:
        from cuda_device import bindings

        bindings.prepare()
        super().exec_module(module)
        bindings.complete(module)


class _Distributed(SourceFileLoader):
    """Adds a backend of the name of NCCL."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        from cuda_device import collectives

        collectives.install()


class _Measurements(SourceFileLoader):
    """Makes what is measured as large as a CPU can measure in no time; a GPU's size takes it
    minutes."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, value in SIZES[module.__name__].items():
            assert hasattr(module, name), f"{module.__name__} has no {name} any more"
            setattr(module, name, value)


SIZES: dict[str, dict[str, Any]] = {
    "gpumix.profiler.compute.peak_flops": {"MAX_MATRIX_ROWS": {"cuda": 256}},
    "gpumix.profiler.compute.optimizer_times": {"OPTIMIZER_NUMEL": 2**18},
    # Kernels of Triton run in its interpreter.
    "gpumix.profiler.compute.numerics_check": {
        "ROOT_ELEMENTS": 2**18,
        "GPU_MAX_CHUNK_ROWS": 8,
        "REPEATS": 1,
    },
    "gpumix.profiler.network": {"MAX_PRODUCT_ROWS": 256},
}
_LOADERS: dict[str, type[SourceFileLoader]] = {
    "torch": _Torch,
    "torch.cuda": _Cuda,
    "torch.distributed": _Distributed,
    **dict.fromkeys(SIZES, _Measurements),
}
