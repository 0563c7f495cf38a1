"""What an `Accelerator` has prepared for training as long as not all is known of which a plan is
made: a model, an optimizer of its parameters, a loader. They may come in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from gpumix.integrations.looped import Looped


@dataclass
class Awaited:
    """
    Attributes:
        models: that may be trained.
        optimizers: as they were prepared.
        loader: the first one that was prepared, as it was given.
    """

    models: list[Looped] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    loader: DataLoader[Any] | None = None

    def known(self, model: nn.Module) -> Looped | None:
        """What was made of a model before."""
        return next((one for one in self.models if one.module is model), None)

    def trained(self) -> list[Looped]:
        """The models whose parameters optimizers update."""
        updated = {
            id(parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return [one for one in self.models if any(id(p) in updated for p in one.parameters())]
