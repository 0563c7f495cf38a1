"""Pacing of all torch code of a thread to the speed of an emulated device.

A dispatch mode sees every operation, in forward, backward and recompute, so the engine, DDP and
FSDP2 need no hooks. Built on `timeline` (the clock) and `flops` (the counts).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpumix.hardware.emulation.flops import find_formula
from gpumix.hardware.emulation.timeline import Timeline
from gpumix.hardware.host.replaced_attributes import replace_attributes

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operation in a special way, given the operation and its arguments."""


class Pacer:
    """Makes the code in its `with` block take FLOPs / rate of wall-clock time, whatever the CPU.

    Communication waits earn no credit: `Work.wait`, `Future.wait` and functional collectives are
    detected. Waits invisible to Python, such as at the end of DDP's backward or for data, must be
    reported with `timeline.idle()`.

    Dispatching through Python adds 3.5 us to an operation and 25 us to one with FLOPs (measured on
    a shared Xeon core, torch 2.13); the device's own time hides it, like all other CPU time.

    Args:
        flops_per_s: the device's speed. Choose it so that the CPU needs at most a quarter of it.
        clock: monotonic seconds.
        sleep: sleeps for some seconds; a surplus is carried over.
    """

    def __init__(
        self,
        flops_per_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.timeline = Timeline(flops_per_s, clock=clock, sleep=sleep)
        self._stack = ExitStack()

    def __enter__(self) -> Pacer:
        with ExitStack() as stack:
            for owner in _list_wait_classes():
                stack.enter_context(replace_attributes(owner, wait=self._paced_wait(owner.wait)))
            stack.enter_context(_PacingMode(self.timeline))
            self._stack = stack.pop_all()
        self.timeline.reset()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _paced_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `original` to earn no credit in this thread, the only thread of the device."""
        thread = threading.get_ident()
        timeline = self.timeline

        @wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            with timeline.waiting():
                return original(*args, **kwargs)

        return wait


def _list_wait_classes() -> list[Any]:
    """Return the classes waiting for communication, used by synchronous collectives and FSDP2
    too."""
    classes: list[Any] = [torch.futures.Future]
    if torch.distributed.is_available():
        classes.append(torch.distributed.Work)
    return classes


def _has_wrapper_type(types: Any) -> bool:
    """Return True if `types` contains DTensor or similar, dispatched before this mode."""
    plain = torch._C._disabled_torch_dispatch_impl
    return any(kind.__torch_dispatch__ is not plain for kind in types)


class _PacingMode(TorchDispatchMode):
    """Passes every operation to its handler; most have none and run unchanged."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid importing torch's compiler (2 s) at the first operation."""
        return False

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline
        self._process = os.getpid()
        self._handlers: dict[Any, Handler | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if types:
            # DTensor infers shapes on fake tensors, which is not device work.
            if any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **(kwargs or {}))
            if _has_wrapper_type(types):
                return NotImplemented
        try:
            handler = self._handlers[func]
        except KeyError:
            handler = self._handlers[func] = self._handler_of(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _handler_of(self, func: Any) -> Handler | None:
        formula = find_formula(func)
        if formula is not None:
            return self._make_compute_handler(formula)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return self._wait
        if isinstance(func, torch._ops.OpOverload) and func._can_decompose():
            return self._decompose  # inference mode shows `linear`, not its `addmm`
        return None

    def _make_compute_handler(self, formula: Callable[..., int]) -> Handler:
        def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if os.getpid() != self._process:  # a forked data loader worker is not the device
                return func(*args, **kwargs)
            self._timeline.begin()
            result = func(*args, **kwargs)
            self._timeline.end(formula(*args, **kwargs, out_val=result))
            return result

        return compute

    def _wait(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._timeline.waiting():
            return func(*args, **kwargs)

    def _decompose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self:
            return func.decompose(*args, **kwargs)
