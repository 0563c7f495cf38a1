"""What the optimizers of whole parameters have in common: groups as torch takes them, a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from gpumix.engine.optimizers.layout import Layout
from gpumix.spec.errors import InputError

Group = dict[str, Any]
# As torch.optim takes them: parameters, named ones, or groups of them with their own settings.
Parameters = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[Group]


class WholeOptimizer(Optimizer, ABC):
    """An optimizer of pieces that gives the result of its namesake over whole parameters.

    Every rank must call `step`, also one that stores nothing; a parameter without gradient is
    passed over, and must be so on all ranks. `whole_states` are those of its states that are not
    cut as parameters are: all ranks hold them, all the same. `state_bytes` are what it keeps for an
    element of a hidden matrix, and of any other parameter.
    """

    whole_states: ClassVar[frozenset[str]] = frozenset()
    state_bytes: ClassVar[tuple[int, int]]

    def __init__(self, groups: list[Group], defaults: dict[str, Any], layout: Layout) -> None:
        self.layout = layout
        super().__init__(groups, defaults)

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

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        foreign = sum(p not in self.layout for p in self.param_groups[-1]["params"])
        if foreign:
            name = type(self).__name__
            raise InputError(
                f"{name} was given {foreign} parameter(s) that are not in its layout",
                fix=f"gpumix.{name}(engine.parameters(), engine.layout(), ...)",
            )


def grouped(parameters: Parameters) -> list[Group]:
    """`parameters` as groups that each hold a list."""
    given: list[Any] = list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": _unnamed(group["params"])} for group in groups]


def _unnamed(parameters: Any) -> list[nn.Parameter]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]  # type: ignore[list-item]
    return [p[1] if isinstance(p, tuple) else p for p in parameters]


def layout_of(groups: list[Group], layout: Layout | None) -> Layout:
    """`layout`, by default that of parameters which are not sharded at all."""
    return layout or Layout.of_whole(p for group in groups for p in group["params"])


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view: pieces are so anyway."""
    return tensor.detach().view(-1)
