"""Base of the optimizers of full parameters: parameter groups as in torch, and a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from gpumix.engine.optimizers.layout import OptimizerLayout
from gpumix.schema.errors import InputError

Group = dict[str, Any]
# As in torch.optim: parameters, named parameters, or groups of these with their own settings.
Parameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[Group]


class StepOptimizer(Optimizer, ABC):
    """An optimizer of real parameters whose step may compute the loss anew, as in torch.

    `_unsupported` are settings of torch's optimizer of the same name that cannot be switched on.
    """

    _unsupported: ClassVar[tuple[str, ...]] = ("maximize",)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with settings of its own.

        Raises:
            InputError: they cannot be updated by these settings.
        """
        super().add_param_group(param_group)
        self._check_group(self.param_groups[-1])

    def _check_group(self, group: Group) -> None:
        """Check that the parameters of a group can be updated by its settings.

        Raises:
            InputError: they cannot.
        """
        name = type(self).__name__
        asked = next((key for key in self._unsupported if group.get(key)), None)
        if asked is not None:
            raise InputError(
                f"{name} does not support '{asked}', which a parameter group sets",
                code="optimizer-setting-unsupported",
                fix="leave it out, or use torch.optim.AdamW",
            )
        if any(p.is_complex() for p in group["params"]):
            raise InputError(
                f"{name} was given complex parameters",
                code="parameters-complex",
                fix="use torch.optim.AdamW, or parameters of real and imaginary parts",
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @abstractmethod
    def _update(self) -> None:
        """Update all parameters that have a gradient."""


class FullParameterOptimizer(StepOptimizer):
    """An optimizer of pieces with the result of its namesake on full parameters.

    Every rank must call `step`, even if it stores nothing. A parameter without gradient is skipped,
    and must be skipped on all ranks. `whole_states` are states that are not sharded like
    parameters: all ranks have equal copies. `state_bytes` are the bytes of state per element of a
    hidden matrix, and of any other parameter. With `exchanges_matrices`, hidden matrices that
    several ranks store travel in bf16 in each step, there and back.
    """

    whole_states: ClassVar[frozenset[str]] = frozenset()
    state_bytes: ClassVar[tuple[int, int]]
    exchanges_matrices: ClassVar[bool] = False

    def __init__(
        self, groups: list[Group], defaults: dict[str, Any], layout: OptimizerLayout
    ) -> None:
        self.layout = layout
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        foreign = sum(p not in self.layout for p in self.param_groups[-1]["params"])
        if foreign:
            name = type(self).__name__
            raise InputError(
                f"{name} was given {foreign} parameter(s) that are not in its layout",
                code="parameters-not-in-layout",
                fix=f"gpumix.{name}(engine.parameters(), engine.layout(), ...)",
            )


def to_parameter_groups(parameters: Parameters) -> list[Group]:
    """Return `parameters` as groups with lists."""
    given: list[Any] = list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": _drop_names(group["params"])} for group in groups]


def _drop_names(parameters: Any) -> list[nn.Parameter]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]  # type: ignore[list-item]
    return [p[1] if isinstance(p, tuple) else p for p in parameters]


def get_layout(groups: list[Group], layout: OptimizerLayout | None) -> OptimizerLayout:
    """Return `layout`, by default the layout of unsharded parameters."""
    return layout or OptimizerLayout.of_whole(p for group in groups for p in group["params"])


def flatten_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D view; pieces are 1-D anyway.

    Raises:
        InputError: the elements are not in order.
    """
    if not tensor.is_contiguous():
        raise InputError(
            f"a parameter of shape {tuple(tensor.shape)} does not have its elements in order",
            code="parameter-not-contiguous",
            why="it is transposed, or in another memory format, and is updated as a vector",
            fix="before the optimizer is made: parameter.data = parameter.data.contiguous()",
        )
    return tensor.detach().view(-1)


def flatten_gradient(p: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, to be read as a vector.

    Raises:
        InputError: it is sparse.
    """
    assert p.grad is not None
    if p.grad.layout is not torch.strided:
        raise InputError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is sparse",
            code="gradient-sparse",
            fix="make its embedding with sparse=False",
        )
    return p.grad.detach().reshape(-1)
