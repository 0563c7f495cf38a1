"""Tensors that are alive: how many, and the most bytes at once."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpumix.engine.engine import Engine
from gpumix.engine.step_state import MAX_UNDONE_STEPS
from helpers.training.models import Batch


def count_tensors() -> int:
    return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())


def assert_no_tensor_waits_for_the_collector(engine: Engine, batch: Batch) -> None:
    """Each tensor that a step and an evaluation make is gone when they end, except a few that take
    back the last steps."""
    for _ in range(MAX_UNDONE_STEPS):
        engine.step(batch)
    gc.collect()
    gc.disable()
    try:
        before = count_tensors()
        engine.step(batch)
        engine.evaluate(batch)
        assert count_tensors() == before
    finally:
        gc.enable()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all memory that the tensors lie in, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside have held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            has_memory = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
            if has_memory and not value.is_meta:
                storage = value.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage)
        self._alive = {k: ref for k, ref in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(_bytes(ref) for ref in self._alive.values()))
        return result


def _bytes(ref: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return storage.nbytes() if storage is not None else 0
