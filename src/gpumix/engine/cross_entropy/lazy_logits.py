"""Lazy logits: a tensor subclass that represents the output of a linear layer.

It follows the usual operations on logits before the loss (scale, cap, cast, slice, reshape), and
passes cross-entropy on to be computed in chunks. Any other operation materializes the ordinary
tensor, by exactly the operations that the model called, so results are always right.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from gpumix.engine.cross_entropy.linear_cross_entropy import LinearCrossEntropy, Operation
from gpumix.engine.model.forward_coroutine import ModelError

# Operations answered from shape and dtype alone.
METADATA_FUNCTIONS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_cuda", "is_sparse")),
    *(getattr(Tensor, name).__get__ for name in ("is_meta", "is_nested", "is_quantized")),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    *(Tensor.is_contiguous, Tensor.element_size, Tensor.get_device, torch.numel),
}  # fmt: skip
# Names of tensor functions and methods. Rows stay complete and in order:
RESHAPES = {"view", "reshape", "flatten", "unsqueeze", "squeeze"}
# Each element maps to an element at the same place:
ELEMENTWISE = {
    *("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "__rsub__", "neg", "tanh"),
    *("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__", "__neg__", "clone"),
}  # fmt: skip
CASTS = {"float", "double", "half", "bfloat16", "to", "type"}


@dataclass(frozen=True)
class Cast:
    """A change of dtype."""

    dtype: torch.dtype

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype)


class LogitsFamily:
    """All tensors made from one output of a linear layer.

    Args:
        loss: computes a loss in chunks, from hidden states, weight, bias and a problem's maker.
        fell_back: called with the name of an unsupported operation.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Callable[[Tensor, Tensor, Tensor | None, Any], Tensor],
        fell_back: Callable[[str], None],
    ) -> None:
        self.weight, self.bias = weight, bias
        self._sources = [(t, t._version) for t in (hidden, weight, bias) if t is not None]
        self._loss = loss
        self.gradients = torch.is_grad_enabled()
        self.whole = False
        self.open = True
        self.members: list[weakref.ref[LazyLogits]] = []
        self._fell_back = fell_back

    def loss(self, hidden: Tensor, problem: Any) -> Tensor:
        """Compute the loss of rows."""
        self._refuse_writes()
        return self._loss(hidden, self.weight, self.bias, problem)

    def _refuse_writes(self) -> None:
        if any(tensor._version != version for tensor, version in self._sources):
            raise ModelError(
                "what the logits are made of was written into after the head was called",
                code="logits-source-overwritten",
                why="chunked cross-entropy computes them when the loss is taken",
                fix="set the plan's `head` to 'whole'",
            )

    def materialize_all(self, wanted: str) -> None:
        """Materialize all members, before an operation that may write into a member."""
        if not self.whole:
            if not self.open:
                raise ModelError(
                    f"the logits are asked for ({wanted}) when the step is over",
                    code="logits-after-step",
                    why="chunked cross-entropy never made them, and the weights are gone",
                    fix="use them in the loss function, or set the plan's `head` to 'whole'",
                )
            self._refuse_writes()
            self._fell_back(wanted)
            self.whole = True
            for member in self.members:
                if (alive := member()) is not None:
                    alive.made()


class LazyLogits(Tensor):
    """Rows of `linear(hidden, weight, bias)` after `operations`.

    Args:
        make: computes the ordinary tensor, as the model would.
    """

    hidden: Tensor
    family: LogitsFamily
    operations: tuple[Operation, ...]
    _make: Callable[[], Tensor]
    _made: Tensor | None

    @staticmethod
    def __new__(
        cls: type[LazyLogits],
        hidden: Tensor,
        family: LogitsFamily,
        *,
        make: Callable[[], Tensor],
        operations: tuple[Operation, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> LazyLogits:
        wanted = hidden.requires_grad or family.weight.requires_grad
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (*hidden.shape[:-1], family.weight.shape[0]),
            dtype=dtype or hidden.dtype,
            device=hidden.device,
            requires_grad=wanted and family.gradients,
        )
        self.hidden, self.family, self.operations = hidden, family, operations
        self._make, self._made = make, None
        family.members.append(weakref.ref(self))
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        if self.family.open or self.family.whole:
            return super().__repr__()
        return f"LazyLogits(not made, size={tuple(self.shape)}, dtype={self.dtype})"

    def made(self) -> Tensor:
        """Return the ordinary tensor, computed on first use."""
        if self._made is None:
            with torch.set_grad_enabled(self.family.gradients):
                self._made = self._make()
        return self._made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next((a for a in args if isinstance(a, LazyLogits)), None)
        if first is not None and first._can_stay_lazy():
            followed = first._apply_lazily(func, args, kwargs)
            if followed is not None:
                return followed
        name = _name(func)

        def real(value: Any) -> Any:
            if not isinstance(value, LazyLogits):
                return value
            value.family.materialize_all(name)
            return value.made()

        args, kwargs = tree_map(real, (args, dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ModelError(
            f"{func} is applied to logits below autograd, where they cannot be followed",
            code="logits-below-autograd",
            fix="set the plan's `head` to 'whole'",
        )

    # -- following ---------------------------------------------------------------------------------

    def _can_stay_lazy(self) -> bool:
        family = self.family
        return family.open and not family.whole and family.gradients == torch.is_grad_enabled()

    def _apply_lazily(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the lazy result of `func`; None if unsupported."""
        name = getattr(func, "__name__", "")
        alone = args[0] is self and not any(isinstance(a, LazyLogits) for a in args[1:])
        if func is F.cross_entropy and alone:
            return self._cross_entropy(*args[1:], **kwargs)
        again = partial(func, **kwargs)
        if name == "contiguous" and alone:
            return self
        if name == "__getitem__" and alone and _keeps_rows(args[1], self.ndim):
            index = tree_map(_copy, args[1])
            return self._derived(self.hidden[index], lambda: again(self.made(), index))
        if name in RESHAPES and alone:
            return self._reshaped(lambda t: again(t, *args[1:]))
        if name in CASTS and alone and not kwargs.get("copy") and len(args) <= 3:
            return self._cast(lambda t: again(t, *args[1:]), (*args[1:], *kwargs.values()))
        if name in ELEMENTWISE:
            return self._elementwise(again, args, kwargs)
        return None

    def _derived(
        self,
        hidden: Tensor,
        make: Callable[[], Tensor],
        operation: Operation | None = None,
        dtype: torch.dtype | None = None,
    ) -> LazyLogits:
        operations = self.operations if operation is None else (*self.operations, operation)
        return LazyLogits(
            hidden, self.family, make=make, operations=operations, dtype=dtype or self.dtype
        )

    def _meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def _reshaped(self, function: Operation) -> LazyLogits | None:
        result = function(self._meta())
        if result.dtype != self.dtype or result.ndim == 0 or result.shape[-1] != self.shape[-1]:
            return None
        hidden = self.hidden.reshape(*result.shape[:-1], self.hidden.shape[-1])
        return self._derived(hidden, lambda: function(self.made()))

    def _cast(self, function: Operation, arguments: tuple[Any, ...]) -> LazyLogits | None:
        here = (torch.dtype, torch.device, str, bool, type(None))
        if not all(isinstance(argument, here) for argument in arguments):
            return None
        devices = [a for a in arguments if isinstance(a, torch.device)]
        if any(isinstance(a, str) for a in arguments) or any(d != self.device for d in devices):
            return None
        wanted = [a for a in arguments if isinstance(a, torch.dtype)]
        if not wanted and devices:
            return self
        dtype = wanted[0] if wanted else function(self._meta()).dtype
        if dtype == self.dtype:
            return self
        if not dtype.is_floating_point:
            return None
        return self._derived(self.hidden, lambda: function(self.made()), Cast(dtype), dtype)

    def _elementwise(
        self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LazyLogits | None:
        place = next(i for i, argument in enumerate(args) if argument is self)
        others = [a for i, a in enumerate(args) if i != place]
        plain = all(isinstance(v, (bool, int, float, str, type(None))) for v in kwargs.values())
        if not plain or not all(self._same_for_all_rows(other) for other in others):
            return None

        args = tuple(a if a is self else _copy(a) for a in args)

        def apply(logits: Tensor, convert: Callable[[Any], Any] = lambda a: a) -> Tensor:
            return function(*(logits if i == place else convert(a) for i, a in enumerate(args)))

        # One row determines shape and dtype. (Arithmetic on meta tensors would import for seconds.)
        row = self.hidden.new_zeros((1,) * (self.ndim - 1) + self.shape[-1:], dtype=self.dtype)
        result = apply(row)
        if result.shape != row.shape or not result.is_floating_point():
            return None
        operation = partial(apply, convert=_flatten_operand)
        return self._derived(self.hidden, lambda: apply(self.made()), operation, result.dtype)

    def _same_for_all_rows(self, other: Any) -> bool:
        if not isinstance(other, Tensor):
            return isinstance(other, (bool, int, float))
        if isinstance(other, LazyLogits):
            return False
        wants_gradient = other.requires_grad and self.family.gradients
        along_rows = other.shape[:-1].numel() != 1 or other.ndim > self.ndim
        return not wants_gradient and not along_rows

    # -- the loss ----------------------------------------------------------------------------------

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        classes = target.dtype == torch.int64 and target.shape == self.shape[:-1]
        older = size_average is not None or reduce is not None
        if self.ndim != 2 or not classes or weight is not None or older:
            return None
        if reduction not in ("mean", "sum") or not self.shape[0]:
            return None
        problem = partial(
            LinearCrossEntropy,
            target=target,
            operations=_without_last_widening(self.operations),
            dtype=self.dtype,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            mean=reduction == "mean",
        )
        return self.family.loss(self.hidden, problem)


def _without_last_widening(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """Drop a final cast to fp32 or fp64, because the loss uses fp32 or fp64 anyway."""
    *before, last = operations or (None,)
    exact = (torch.float32, torch.float64)
    if isinstance(last, Cast) and last.dtype in exact:
        narrows = any(isinstance(o, Cast) and o.dtype == torch.float64 for o in before)
        if not narrows:
            return tuple(o for o in before if o is not None)
    return operations


def _keeps_rows(index: Any, ndim: int) -> bool:
    """Return whether indexing selects full rows, and keeps the last of `ndim` dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(p, (int, slice, Tensor)) or p is Ellipsis for p in parts):
        return False
    used = sum(
        p.ndim if isinstance(p, Tensor) and p.dtype == torch.bool else 1
        for p in parts
        if p is not Ellipsis
    )
    reaches_last = used == ndim or (any(p is Ellipsis for p in parts) and parts[-1] is not Ellipsis)
    last = parts[-1]
    return not reaches_last or (isinstance(last, slice) and last == slice(None))


def _copy(value: Any) -> Any:
    """Copy an operand, because the model may write into it before the logits are computed."""
    return value.clone() if isinstance(value, Tensor) else value


def _flatten_operand(operand: Any) -> Any:
    """Convert an operand of N-dimensional logits for 2-D logits."""
    return operand.reshape(-1) if isinstance(operand, Tensor) and operand.ndim else operand


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)
