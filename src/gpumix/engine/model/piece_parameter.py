"""Pieces of parameters as programs see them: only what is the same for any pieces can be computed.

A program may do anything with the parameters of its optimizer: clip by a norm, subtract a mean,
group by dimensions. On a flat piece most of it runs, and depends on the plan. So outside of
optimizers that are known to treat elements one by one, operations on pieces are restricted to such
operations; what they return is a piece again. Shapes are those of the full parameter. Where each
rank has all elements, a piece is computed with as the full parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizers
from torch.utils._pytree import tree_leaves, tree_map

from gpumix.schema.errors import InputError

# Of tensors as such, not of their elements.
METADATA = frozenset(
    ("_backward_hooks", "_base", "_has_compatible_shallow_copy_type", "_is_view", "_version",
     "__hash__", "data_ptr", "device", "dtype", "element_size", "get_device", "grad_fn",
     "is_complex", "is_contiguous", "is_cpu", "is_cuda", "is_floating_point", "is_inference",
     "is_leaf", "is_meta", "is_mps", "is_nested", "is_pinned", "is_quantized", "is_sparse",
     "is_sparse_csr", "is_xpu", "layout", "names", "nelement", "numel", "output_nr",
     "record_stream", "requires_grad", "requires_grad_", "retains_grad", "storage_offset", "stride",
     "untyped_storage")
)  # fmt: skip
# Reads of the elements, which a program sees as this rank's.
VALUES = frozenset(("__array__", "__format__", "__repr__", "item", "numpy", "tolist"))
# Of each element by itself, though torch does not mark them so.
ELEMENTWISE = frozenset(
    ("__and__", "__iadd__", "__idiv__", "__imul__", "__invert__", "__ipow__", "__isub__",
     "__itruediv__", "__or__", "__radd__", "__rdiv__", "__rmul__", "__rpow__", "__rsub__",
     "__truediv__", "__xor__", "_foreach_copy_", "_foreach_zero_", "_fused_adagrad_",
     "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "absolute", "bfloat16", "bool", "clone",
     "contiguous", "copy_", "cpu", "cuda", "data", "detach", "detach_", "divide", "double",
     "empty_like", "fill_", "float", "full_like", "half", "int", "long", "multiply", "negative",
     "ones_like", "pin_memory", "subtract", "to", "type", "type_as", "zero_", "zeros_like")
)  # fmt: skip
REDUCTIONS = frozenset(("max", "min", "equal"))  # marked as element-wise for other arguments
OF_LISTS = ("_foreach_", "_fused_")  # prefixes of operations on lists of tensors
FLATTENING = frozenset(("view", "reshape", "flatten", "ravel"))
SHAPES = frozenset(("shape", "size", "dim", "ndim", "ndimension"))
RANDOM = (torch.Tag.nondeterministic_seeded,)


class _Guarded(torch.Tensor):
    """A rank's elements of a parameter, or values computed from them.

    Attributes:
        full_shape: of the parameter.
        is_whole: whether each rank has all elements of all parameters.
    """

    full_shape: torch.Size
    parameter_name: str
    is_whole = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            first = next(one for one in tensors if isinstance(one, _Guarded))
            name = _name_of(func)
            if name == "data" and func.__name__ == "__set__":
                return _set_values(args[0], args[1])
            if name in METADATA or (name in VALUES and not first.is_whole):
                return func(*args, **kwargs)
            if first.is_whole or name in SHAPES:
                return _compute_whole(func, args, kwargs, only_shapes=not first.is_whole)
            flattens = name in FLATTENING and _flattens(args[1:], kwargs)
            if not (flattens or name in ELEMENTWISE or _is_elementwise(name)):
                raise _make_error(first, f"{name} of it")
            if not name.startswith(OF_LISTS):
                _check_shapes(name, first, tensors)
                return tree_map(lambda value: _as_piece(value, first), func(*args, **kwargs))
            lists = [one for one in (*args, *kwargs.values()) if _is_tensor_list(one)]
            for row in zip(*lists):
                _check_shapes(name, next((t for t in row if isinstance(t, _Guarded)), first), row)
            result = func(*args, **kwargs)
            if not isinstance(result, list | tuple):
                return result
            likes = next(one for one in lists if any(isinstance(t, _Guarded) for t in one))
            return [_as_piece(value, like) for value, like in zip(result, likes)]


class PieceTensor(_Guarded):
    """Values computed from a piece, or its gradient. Saved as an ordinary tensor."""

    def __deepcopy__(self, _: Any) -> PieceTensor:
        return self.detach().clone()  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class PieceParameter(_Guarded, nn.Parameter):
    """A piece, which optimizers update. It shares memory and gradient with a plain parameter, the
    local one."""

    _local: nn.Parameter
    # The gradient of each step, and the same as a piece once asked for: optimizers ask often.
    _usual_gradient: torch.Tensor | None = None
    _usual_piece: PieceTensor | None = None

    @staticmethod
    def of(local: nn.Parameter, name: str, full_shape: torch.Size) -> PieceParameter:
        own = torch.Tensor._make_subclass(PieceParameter, local.data, local.requires_grad)
        own._local, own.full_shape, own.parameter_name = local, full_shape, name
        return own

    @property
    def grad(self) -> torch.Tensor | None:
        gradient = self._local.grad
        if gradient is None or not torch._C._is_torch_function_enabled():
            return gradient
        if gradient is not self._usual_gradient:
            return _as_piece(gradient, self)  # type: ignore[no-any-return]
        if self._usual_piece is None:
            self._usual_piece = _as_piece(gradient, self)
        return self._usual_piece

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self._local.grad = None
            return
        with torch._C.DisableTorchFunctionSubclass():
            flat = value.as_subclass(torch.Tensor).reshape(-1)
            before = self._local.grad
            if before is None or before.data_ptr() != flat.data_ptr():
                self._local.grad = flat

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PieceParameter:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                local = nn.Parameter(self._local.detach().clone(), self._local.requires_grad)
                if self._local.grad is not None:
                    local.grad = self._local.grad.clone()
            memo[id(self)] = PieceParameter.of(local, self.parameter_name, self.full_shape)
        return memo[id(self)]  # type: ignore[no-any-return]

    def expect_gradient(self, gradient: torch.Tensor) -> None:
        """Expect a gradient that the local parameter will have in each step, in the same memory."""
        self._usual_gradient, self._usual_piece = gradient, None

    def follow_local(self) -> None:
        """Take the memory that the local parameter has now."""
        with torch._C.DisableTorchFunctionSubclass():
            self.data = self._local.data


# Types for which torch's optimizers choose their fused kernels by themselves.
_fused_types = getattr(torch_optimizers, "_foreach_supported_types", [])
if PieceParameter not in _fused_types:
    _fused_types.append(PieceParameter)


def _compute_whole(func: Callable[..., Any], args: Any, kwargs: Any, *, only_shapes: bool) -> Any:
    """Call a function with full parameters in place of pieces."""

    def full(value: Any) -> Any:
        if not isinstance(value, _Guarded):
            return value
        if only_shapes:
            return torch.empty(value.full_shape, device="meta")
        return value.as_subclass(torch.Tensor).view(value.full_shape)

    return func(*tree_map(full, args), **tree_map(full, kwargs))


def _as_piece(value: Any, like: torch.Tensor) -> Any:
    if (
        not isinstance(value, torch.Tensor)
        or isinstance(value, _Guarded)
        or not isinstance(like, _Guarded)
    ):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        piece = value.as_subclass(PieceTensor)
    piece.full_shape, piece.parameter_name = like.full_shape, like.parameter_name
    piece.is_whole = like.is_whole
    return piece


def _set_values(piece: torch.Tensor, values: torch.Tensor) -> None:
    """Assign to `data`: into the piece's own memory, which the engine knows."""
    if not isinstance(piece, _Guarded):
        raise _make_error(values, "its memory for another tensor")
    if values.numel() != piece.numel():
        raise _make_error(piece, "data of another shape")
    piece.as_subclass(torch.Tensor).detach().copy_(values.as_subclass(torch.Tensor).reshape(-1))


def _check_shapes(name: str, first: _Guarded, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors that torch would broadcast with a piece."""
    if any(one.numel() not in (1, first.numel()) or one.ndim > 1 for one in tensors):
        raise _make_error(first, f"{name} with a tensor of another shape")


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, torch.Tensor) for one in value)


def _name_of(func: Any) -> str:
    """Return the name of an operation; of a property for its getter."""
    name: str = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__"):
        return str(getattr(func.__self__, "__name__", name))
    return name


@cache
def _is_elementwise(name: str) -> bool:
    """Return True if torch marks the operation as computing each element by itself."""
    if name in REDUCTIONS:
        return False
    base = name.removeprefix("_foreach_").strip("_")
    if name.startswith("__") and base.startswith(("i", "r")) and not hasattr(torch.ops.aten, base):
        base = base[1:]
    overloads = [
        getattr(packet, overload)
        for one in (base, f"{base}_")
        if (packet := getattr(torch.ops.aten, one, None)) is not None
        for overload in packet.overloads()
    ]
    tags = {tag for overload in overloads for tag in overload.tags}
    return torch.Tag.pointwise in tags and not tags.intersection(RANDOM)


def _flattens(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    sizes = [one for one in tree_leaves((list(args), kwargs)) if isinstance(one, int)]
    return sizes in ([], [-1])


def _make_error(piece: Any, what: str) -> InputError:
    return InputError(
        f"this rank has a piece of parameter '{piece.parameter_name}', and a program asked for "
        f"{what}",
        code="parameter-piece-incomplete",
        why="norms, means, comparisons and parts of a piece are not those of the parameter, so the "
        "result would depend on the plan",
        fix="clip with engine.clip_grad_norm_(max_norm), or max_grad_norm of a Trainer; "
        "engine.gradient_norm() is the norm of all gradients; compute element by element; or "
        "change full weights inside of `with gpumix.summon_full_params(model):`",
    )
