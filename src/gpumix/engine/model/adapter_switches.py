"""Switches of PEFT's adapters: which are active, and whether they are off.

A call of the model that changes them means its own micro-batch alone. Micro-batches run in turn,
and units are run again in backward, after the call has changed them back.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# Of layers with adapters, which PEFT switches all at once, and of the model around them.
_SWITCHES = ("_disable_adapters", "_active_adapter", "_adapters_disabled")


class AdapterSwitches:
    """The switches of a model's adapters.

    Attributes:
        holders: attributes of the first layer with adapters, and of PEFT's models.
    """

    def __init__(self, model: nn.Module) -> None:
        every = [vars(module) for module in model.modules()]
        layers = [own for own in every if _SWITCHES[0] in own]
        self.holders = [*layers[:1], *(own for own in every if _SWITCHES[2] in own)]

    def read(self) -> list[Any]:
        """Return what the switches are."""
        return [own.get(name) for own in self.holders for name in _SWITCHES]
