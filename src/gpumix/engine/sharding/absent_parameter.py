"""Placeholders of parameters in modules: between steps, or on ranks without the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.sharding.shard import Piece
from gpumix.schema.errors import InputError

PERMITTED_PROPERTIES = ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout",
                       "is_cuda", "is_cpu", "is_meta", "is_quantized", "is_sparse")  # fmt: skip
PERMITTED_METHODS = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point",
                    "is_complex", "stride", "requires_grad_", "__hash__")  # fmt: skip
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_OWN_GRAD: Any = torch.Tensor.grad
get_own_gradient: Callable[[torch.Tensor], torch.Tensor | None] = _OWN_GRAD.__get__
# Permitted operations on a parameter without values.
PERMITTED_FUNCTIONS = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in PERMITTED_PROPERTIES]
    + [getattr(torch.Tensor, name) for name in PERMITTED_METHODS]
    + [_REQUIRES_GRAD.__set__]
)


class AbsentParameter(nn.Parameter):
    """A parameter with a shape but no values; any other use raises an error with the name."""

    parameter_name: str

    @staticmethod
    def of(parameter: nn.Parameter, name: str) -> AbsentParameter:
        away = torch.Tensor._make_subclass(AbsentParameter, parameter.data, parameter.requires_grad)
        away.parameter_name = name
        return away

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in PERMITTED_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        named = [
            a.parameter_name for a in tree_leaves((args, kwargs)) if isinstance(a, AbsentParameter)
        ]
        if func == _OWN_GRAD.__get__:
            raise ModelError(
                f"the gradient of parameter '{named[0]}' is read, and this rank has a piece of it",
                code="gradient-of-piece-read",
                why="gradients are sharded over ranks as the optimizer's state is",
                fix="clip gradients with clip_grad_norm_ of the Accelerator or engine, or with "
                "max_grad_norm or gradient_clip_val of a Trainer; gradients of the optimizer's "
                "groups can be changed element by element",
            )
        raise ModelError(
            f"parameter '{named[0]}' is used while its unit is not computed",
            code="parameter-used-outside-unit",
            why="its values are sharded over ranks, and gathered when the model calls the unit",
            fix="outside of a step: `with gpumix.summon_full_params(model):` on all ranks, inside "
            "of which the model has all of its weights; inside of the model use a unit's "
            "parameters in that unit only; in place of a penalty on weights set the "
            "optimizer's weight_decay",
        )


class MasterParameter(nn.Parameter):
    """A parameter between two steps on a rank with all of its values, which the optimizer updates.
    `grad` is the gradient that the optimizer will use."""

    # Copies, and parameters loaded from a file, have no piece.
    _piece: Piece | None = None
    place: int = 0  # address of the values

    @staticmethod
    def of(values: torch.Tensor, piece: Piece) -> MasterParameter:
        rest = torch.Tensor._make_subclass(MasterParameter, values, piece.local.requires_grad)
        rest._piece, rest.place = piece, values.data_ptr()
        return rest

    @property
    def grad(self) -> torch.Tensor | None:
        if self._piece is None:
            return _OWN_GRAD.__get__(self)  # type: ignore[no-any-return]
        gradient = self._piece.local.grad
        return None if gradient is None else gradient.view(self.shape)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._piece is None:
            _OWN_GRAD.__set__(self, value)
        else:
            self._piece.local.grad = None if value is None else value.reshape(-1)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def parameter_name(self) -> str:
        assert self._piece is not None, "of an engine"
        return self._piece.name

    def refuse_changes(self, *, trained: bool) -> None:
        """Refuse a change of the parameter since the model was sharded.

        Raises:
            InputError: `requires_grad` is not `trained`; or the optimizer would not see the
                parameter's memory, which was replaced, or its gradient, of a backward pass outside
                of the engine.
        """
        if self.requires_grad is not trained:
            refuse_frozen_or_thawed(self, trained=trained)
        if self.data_ptr() != self.place:
            raise InputError(
                f"parameter '{self.parameter_name}' was moved, cast or replaced since the model "
                "was sharded",
                code="parameter-replaced",
                why="the optimizer updates the values that the engine keeps",
                fix="move or cast the model before; or call gpumix.unshard(model), and train it as "
                "a new model",
            )
        if get_own_gradient(self) is not None:
            raise InputError(
                f"a backward pass outside of the engine gave parameter '{self.parameter_name}' a "
                "gradient, which no optimizer would see",
                code="gradient-from-outside",
                fix="compute the loss in what is trained: compute_loss, or the model's forward; "
                "with an Accelerator of what the prepared model returns",
            )


def refuse_frozen_or_thawed(parameter: AbsentParameter | MasterParameter, *, trained: bool) -> None:
    """Refuse a parameter whose `requires_grad` is not `trained` any more.

    Raises:
        InputError: always.
    """
    done = "frozen" if trained else "thawed"
    raise InputError(
        f"parameter '{parameter.parameter_name}' was {done} after the model was sharded",
        code="parameter-replaced",
        why="the state of the parameters that are trained is laid out before the first step",
        fix="freeze parameters first; to train in phases, make a new Trainer, or prepare the model "
        "again, for each phase",
    )
