"""Objects prepared for training, in any order, before all inputs of a plan are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from gpumix.integrations.accelerate.wrapped_model import WrappedModel


@dataclass
class PreparedObjects:
    """Objects that an accelerator has prepared so far.

    Attributes:
        models: trainable models.
        optimizers: prepared optimizers.
        loader: the first prepared loader, as given.
    """

    models: list[WrappedModel] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    loader: DataLoader[Any] | None = None

    def known(self, model: nn.Module) -> WrappedModel | None:
        """Return the `WrappedModel` made of a model before, or None."""
        return next((one for one in self.models if one.module is model), None)

    def trained(self) -> list[WrappedModel]:
        """Return the models with parameters that optimizers update."""
        updated = {
            id(parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return [one for one in self.models if any(id(p) in updated for p in one.parameters())]
