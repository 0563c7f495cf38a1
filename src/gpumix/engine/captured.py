"""Values that a model takes from inside its units, beside what they return: a router's logits.

transformers collects them by hooks, in lists that the hooks find in a context variable; or units
put them into lists and dicts that they are given. To the engine they are further outputs of a unit,
so that their gradients cross its boundary too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import Context
from typing import Any

from gpumix.engine.containers import Containers, Put

# By the key of a hook's list, and by the number of a container.
Collected = tuple[dict[str, list[Any]], Put]


class Captured:
    """What the context of one unit call, and the containers that it is given, collect.

    Args:
        context: of the model's own code around the call.
        given: the model's own containers; None: there are none, or none may be changed.
    """

    def __init__(self, context: Context, given: Containers | None = None) -> None:
        module = sys.modules.get("transformers.utils.output_capturing")
        self._context = context
        self._variable = getattr(module, "_active_collector", None)
        self._collector: Any = context.run(self._variable.get) if self._variable else None
        self._given = given
        self._put: Put = {}

    @property
    def collected(self) -> Collected:
        """So far."""
        return _lists(self._collector or {}), self._put

    def run(
        self, function: Callable[[], Any], copies: Containers | None = None
    ) -> tuple[Any, Collected]:
        """Call `function` in the model's context: its result, and what was collected in it.

        Args:
            copies: containers that it is given in the places of the model's own.
        """
        context, collected = self.apart()
        result = context.run(function)
        put = {} if copies is None else copies.put(allowed=self._given is not None)
        return result, (collected, put)

    def apart(self) -> tuple[Context, dict[str, list[Any]]]:
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
        lists, self._put = collected
        for key, values in lists.items():
            self._collector[key].extend(values)
        if self._given is not None:
            self._given.fill(self._put)


def _lists(collector: dict[str, Any]) -> dict[str, list[Any]]:
    return {key: values for key, values in collector.items() if isinstance(values, list)}
