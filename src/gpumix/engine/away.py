"""What a module holds in the place of a parameter whose values are not on this device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gpumix.engine.coroutine import ModelError

HARMLESS_PROPERTIES = ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout",
                       "is_cuda", "is_cpu", "is_meta", "is_quantized", "is_sparse")  # fmt: skip
HARMLESS_METHODS = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point",
                    "is_complex", "stride", "__hash__")  # fmt: skip
# What may be asked of a parameter that is away.
HARMLESS = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in HARMLESS_PROPERTIES]
    + [getattr(torch.Tensor, name) for name in HARMLESS_METHODS]
)


class Away(nn.Parameter):
    """A parameter whose values are not here: it has a shape, and refuses all else by its name."""

    parameter_name: str

    @staticmethod
    def of(parameter: nn.Parameter, name: str) -> Away:
        away = torch.Tensor._make_subclass(Away, parameter.data, parameter.requires_grad)
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
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        named = [a.parameter_name for a in tree_leaves((args, kwargs)) if isinstance(a, Away)]
        raise ModelError(
            f"parameter '{named[0]}' is used while its unit is not computed",
            why="its values are sharded over ranks, and gathered when the model calls the unit",
            fix="outside of a step use the engine: parameters(), named_parameters(), state_dict(), "
            "clip_grad_norm_(); in a script save the whole model, and load what was saved: "
            "trainer.save_model(), or accelerator.get_state_dict(model) on all ranks; inside of "
            "the model use a unit's parameters in that unit only",
        )
