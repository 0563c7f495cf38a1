"""Inputs of a unit call for its recompute, on the device or offloaded to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpumix.engine.offload.host_offload import OffloadedTensor, OffloadStore


class UnitInputs:
    """The inputs of a unit call.

    Args:
        inputs: detached from the model's graph.
        wanted: whether each input wants a gradient. Such inputs are activations of this call. Other
            inputs (masks, position tables) are shared by many calls and stay in place.
    """

    def __init__(self, inputs: Sequence[Any], wanted: Sequence[bool]) -> None:
        self._inputs = list(inputs)
        self._wanted = wanted
        self._away: dict[int, OffloadedTensor] = {}

    def send(self, host: OffloadStore) -> None:
        """Move the activations to the host."""
        for place, wanted in enumerate(self._wanted):
            if wanted:
                self._away[place] = host.keep(self._inputs[place])
                self._inputs[place] = None

    def fetch(self) -> None:
        """Start to fetch the activations."""
        for kept in self._away.values():
            kept.fetch()

    def make_leaves(self) -> list[Any]:
        """Return the inputs as leaves, ready for differentiation."""
        for place, kept in self._away.items():
            self._inputs[place] = kept.reload()
        self._away = {}
        return [
            t.detach().requires_grad_() if wanted else t
            for t, wanted in zip(self._inputs, self._wanted)
        ]
