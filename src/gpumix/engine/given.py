"""What a unit call was given, for its recompute: on the device, or on the host in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpumix.engine.host import HostStore, Kept


class Given:
    """The inputs of one call.

    Args:
        inputs: detached from the model's graph.
        wanted: of each, whether it wants a gradient. Those are activations, of which every call has
            its own; what else a unit is given (masks, position tables) many calls share, and it
            stays where it is.
    """

    def __init__(self, inputs: Sequence[Any], wanted: Sequence[bool]) -> None:
        self._inputs = list(inputs)
        self._wanted = wanted
        self._away: dict[int, Kept] = {}

    def send(self, host: HostStore) -> None:
        """Move the activations to the host."""
        for place, wanted in enumerate(self._wanted):
            if wanted:
                self._away[place] = host.keep(self._inputs[place])
                self._inputs[place] = None

    def fetch(self) -> None:
        """Begin to bring them back."""
        for kept in self._away.values():
            kept.fetch()

    def fresh(self) -> list[Any]:
        """The inputs, ready to be differentiated; leaves."""
        for place, kept in self._away.items():
            self._inputs[place] = kept.on_device()
        self._away = {}
        return [
            t.detach().requires_grad_() if wanted else t
            for t, wanted in zip(self._inputs, self._wanted)
        ]
