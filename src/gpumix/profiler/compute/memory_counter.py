"""Memory counter of a device: from the allocator if it counts, otherwise from tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpumix.hardware.device import DeviceRuntime
from gpumix.hardware.emulation.flops import count_recomputed_flops, find_formula


class MemoryCounter:
    """Current and peak bytes while a `with` block runs.

    If the runtime cannot count (a CPU without compiler), the tensors of every operation are tracked
    instead, without the internal allocations of kernels.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._tracker = _StorageTracker() if runtime.current_bytes() is None else None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> MemoryCounter:
        if self._tracker is not None:
            self._stack.enter_context(self._tracker)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def stop_tracking(self) -> Iterator[None]:
        """Stop tracking, which costs time; nothing may be counted afterwards."""
        self._stack.close()
        yield

    def current(self) -> int:
        return self._tracker.current if self._tracker else self._runtime.current_bytes() or 0

    def peak(self) -> int:
        return self._tracker.peak if self._tracker else self._runtime.peak_bytes() or 0

    def reset_peak(self) -> None:
        if self._tracker:
            self._tracker.peak = self._tracker.current
        else:
            self._runtime.reset_peak()

    def measure_added(self, work: Callable[[], object]) -> int:
        """Return the bytes allocated by `work` and still in use."""
        before = self.current()
        work()
        return max(0, self.current() - before)


class _StorageTracker(TorchDispatchMode):
    """Sum of the storages of all tensors returned by operations, until freed."""

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._alive: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.finalize(storage, self._free, key, storage.nbytes())
            self.current += storage.nbytes()
            self.peak = max(self.peak, self.current)

    def _free(self, key: int, numel: int) -> None:
        del self._alive[key]
        self.current -= numel


class FlopCounter(TorchDispatchMode):
    """FLOPs of the operations in a `with` block with a known formula; `rerun` is the part of scores
    recomputed in the backward of fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.rerun = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = find_formula(func)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
            self.rerun += count_recomputed_flops(func, args)
        return result
