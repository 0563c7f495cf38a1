"""Deferred initialization: builds a model without weights, and makes single tensors later.

`build` runs a constructor with large tensors on the meta device and records every operation on
them; `Log.materialize` replays the operations that a tensor needs. Random operations are seeded by
their number among the random operations, since a module imported meanwhile may run more. So a
tensor's values do not depend on which tensors are made, nor by which rank: each rank gets its part
of the model's own initialization, and no rank has the full model.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from gpumix.hardware.host.replaced_attributes import replace_attributes

# Tensors up to this many elements are made at once: position tables, norms, biases. Constructors
# read values of small tensors (`.item()` of a drop-path schedule), which meta tensors lack.
SMALL_NUMEL = 8192

_CPU, _META = torch.device("cpu"), torch.device("meta")
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


@dataclass
class Operation:
    """A recorded call. `outputs` has the returned meta tensors, and None for real tensors.

    `number` orders the calls; `draw` counts calls that draw random numbers, up to this call.
    """

    number: int
    draw: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor | None]

    def deferred_tensors(self) -> Iterator[torch.Tensor]:
        for value in (*tree_iter((self.args, self.kwargs)), *self.outputs):
            if _is_deferred(value):
                yield value


@dataclass
class OperationLog:
    """Record of the operations on a model's deferred tensors, by storage.

    A deferred tensor is a view (shape, strides, offset) of a meta storage; the storage's identity
    is its key. The log keeps its tensors alive, so that keys stay unique.
    """

    seed: int
    of_storage: dict[int, list[Operation]] = field(default_factory=dict)

    def add(self, operation: Operation) -> None:
        for key in {_key(t) for t in operation.deferred_tensors()}:
            self.of_storage.setdefault(key, []).append(operation)

    def knows(self, value: object) -> TypeGuard[torch.Tensor]:
        """Return whether `value` is a tensor of this log."""
        return _is_deferred(value) and _key(value) in self.of_storage

    @torch.no_grad()
    def materialize(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute the values of a deferred `tensor`, on the CPU.

        Random numbers come from the CPU's generator and are independent of the device.

        Raises:
            KeyError: `tensor` is not in this log.
        """
        real: dict[int, torch.Tensor] = {}
        for operation in self._needed(_key(tensor)):
            args, kwargs = tree_map(
                lambda a: _view_like(real[_key(a)], a) if _is_deferred(a) else a,
                (operation.args, operation.kwargs),
            )
            if "device" in kwargs:
                kwargs["device"] = _CPU
            result = _run_seeded(self.seed, operation.draw, operation.function, args, kwargs)
            for meta, made in zip(operation.outputs, _tensors(result)):
                if meta is not None and _key(meta) not in real:
                    real[_key(meta)] = _match_strides(made, meta)
        return _view_like(real[_key(tensor)], tensor)

    def _needed(self, key: int) -> list[Operation]:
        """Return the operations that determine a storage's values, in recorded order."""
        wanted, seen, found = [key], set(), {}
        while wanted:
            key = wanted.pop()
            if key not in seen:
                seen.add(key)
                for operation in self.of_storage[key]:
                    found[operation.number] = operation
                    wanted += [_key(t) for t in operation.deferred_tensors()]
        return [found[number] for number in sorted(found)]


_LOGS: WeakKeyDictionary[nn.Module, OperationLog] = WeakKeyDictionary()


def build(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the model of `factory` without large parameters; `seed` determines their values.

    Buffers and tensors in plain attributes are real, in full on every rank. A constructor that
    reads values of large tensors cannot be deferred: its model is built normally, on the CPU and
    under the same seed.
    """
    recorder = _Recorder(seed)
    try:
        with recorder, recorder.truncated_normal(), _HiddenMetaMode():
            model = factory()
    except (_CannotDefer, RuntimeError, TypeError):  # last two: torch's, from reading values
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return factory()
    _LOGS[model] = recorder.log
    _materialize_non_parameters(model, recorder.log)
    return model


def get_operation_log(model: nn.Module) -> OperationLog | None:
    """Return the log of a model made by `build`, otherwise None."""
    return _LOGS.get(model)


def _materialize_non_parameters(model: nn.Module, log: OperationLog) -> None:
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for place in (module._buffers, vars(module)):
            for name, value in place.items():
                if log.knows(value) and not isinstance(value, nn.Parameter):
                    if id(value) not in made:
                        made[id(value)] = log.materialize(value)
                    place[name] = made[id(value)]


class _CannotDefer(Exception):
    """The constructor needs values of deferred tensors."""


class _HiddenMetaMode(TorchFunctionMode):
    """Mode that hides the meta device. Initializers skip meta tensors, and must be recorded."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return False if func == _IS_META else func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Mode that puts large new tensors on the meta device and records the operations."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.log = OperationLog(seed)
        self.number = 0
        self.draw = 0

    def truncated_normal(self) -> contextlib.AbstractContextManager[None]:
        """Record truncated normal initialization as one operation; torch redraws by value."""
        original = nn.init._no_grad_trunc_normal_

        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._count(original)
            if not _is_deferred(tensor):
                return _run_seeded(self.log.seed, self.draw, original, (tensor, *args), kwargs)
            self.log.add(Operation(self.number, self.draw, original, (tensor, *args), kwargs, []))
            return tensor

        return replace_attributes(nn.init, _no_grad_trunc_normal_=record)

    def _count(self, func: Any) -> None:
        self.number += 1
        self.draw += _is_random(func)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._count(func)
        deferred = [a for a in tree_iter((args, kwargs)) if _is_deferred(a)]
        if not all(self.log.knows(a) for a in deferred):
            # Made on the meta device before the constructor ran.
            raise _CannotDefer("a tensor on the meta device whose values nobody wrote down")
        if not deferred:
            # Deferred too: a small tensor that code moves to the device of a deferred one, and one
            # that torch itself makes there, like the 7 in `weight[0] = 7.0`.
            if not _makes_large(func, args) and kwargs.get("device") != _META:
                return _run_seeded(self.log.seed, self.draw, func, args, kwargs)
            kwargs = {**kwargs, "device": _META}
        result = func(*args, **kwargs)
        outputs = [t if _is_deferred(t) else None for t in _tensors(result)]
        self.log.add(Operation(self.number, self.draw, func, args, kwargs, outputs))
        return result


def _makes_large(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether `func` creates a large tensor (`empty`, `zeros`, `randn`, ...)."""
    factory = any(a.name == "device" for a in func._schema.arguments)
    if not factory or not args or not isinstance(args[0], (list, tuple)):
        return False
    return prod(int(size) for size in args[0]) > SMALL_NUMEL


def _is_random(func: Any) -> bool:
    """Return whether a call draws random numbers: tagged operations and plain functions."""
    return not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags


def _run_seeded(
    seed: int, draw: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `func`; random operations use a generator seeded by the draw number."""
    if not _is_random(func):
        return func(*args, **kwargs)
    digest = hashlib.sha256(f"{seed}:{draw}".encode()).digest()
    before = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return func(*args, **kwargs)
    finally:
        torch.default_generator.set_state(before)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]


def _is_deferred(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _match_strides(made: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """Return `made` with the strides of `meta`, which views rely on. Strides depend on kernels."""
    if made.stride() == meta.stride() or made.numel() == 0:
        return made
    return torch.empty_strided(meta.shape, meta.stride(), dtype=made.dtype).copy_(made)


def _view_like(real: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    return real.as_strided(meta.shape, meta.stride(), meta.storage_offset())
