"""Values that a model takes from inside its units, beside what they return: a router's logits.

transformers collects them by hooks, in lists that the hooks find in a context variable. To the
engine they are further outputs of a unit, so that their gradients cross its boundary too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import Context
from typing import Any

Collected = dict[str, list[Any]]


class Captured:
    """What the context of one unit call collects.

    Args:
        context: of the model's own code around the call.
    """

    def __init__(self, context: Context) -> None:
        module = sys.modules.get("transformers.utils.output_capturing")
        self._context = context
        self._variable = getattr(module, "_active_collector", None)
        self._collector: Any = context.run(self._variable.get) if self._variable else None

    @property
    def collected(self) -> Collected:
        """So far."""
        return _lists(self._collector or {})

    def run(self, function: Callable[[], Any]) -> tuple[Any, Collected]:
        """Call `function` in the model's context: its result, and what was collected in it."""
        context, collected = self.apart()
        return context.run(function), collected

    def apart(self) -> tuple[Context, Collected]:
        """A copy of the context, in which the model's hooks collect as much, but nothing for the
        model; and what they do."""
        context, collected = self._context.copy(), {}
        if self._variable and self._collector:
            # beside the lists there are settings
            fresh = {k: [] if isinstance(v, list) else v for k, v in self._collector.items()}
            context.run(self._variable.set, fresh)
            collected = _lists(fresh)
        return context, collected

    def hand_over(self, collected: Collected) -> None:
        """Give the model what was collected."""
        for key, values in collected.items():
            self._collector[key].extend(values)


def _lists(collector: dict[str, Any]) -> Collected:
    return {key: values for key, values in collector.items() if isinstance(values, list)}
