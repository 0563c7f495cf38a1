"""Values taken by a model from inside units in addition to return values, e.g. router logits.

transformers collects the values by hooks, in lists found in a context variable. Units may also put
values into lists and dicts in their arguments. The engine treats the values as additional outputs
of a unit, so that their gradients cross its boundary too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import Context
from typing import Any

from gpumix.engine.model.containers import ContainerChanges, Containers

# By key of a hook's list, and by index of a container.
Collected = tuple[dict[str, list[Any]], ContainerChanges]


class OutputCapture:
    """Values collected by the context and the containers of one unit call.

    Args:
        context: context of the model's own code around the call.
        given: the model's own containers; None: there are none, or none may be changed.
    """

    def __init__(self, context: Context, given: Containers | None = None) -> None:
        module = sys.modules.get("transformers.utils.output_capturing")
        self._context = context
        self._variable = getattr(module, "_active_collector", None)
        self._collector: Any = context.run(self._variable.get) if self._variable else None
        self._given = given
        self._put: ContainerChanges = {}

    @property
    def collected(self) -> Collected:
        """The values collected so far."""
        return _select_lists(self._collector or {}), self._put

    def run(
        self, function: Callable[[], Any], copies: Containers | None = None
    ) -> tuple[Any, Collected]:
        """Call `function` in the model's context; return its result and the collected values.

        Args:
            copies: containers passed to the function in place of the model's own.
        """
        context, collected = self.copy_context()
        result = context.run(function)
        put = {} if copies is None else copies.put(allowed=self._given is not None)
        return result, (collected, put)

    def copy_context(self) -> tuple[Context, dict[str, list[Any]]]:
        """Copy the context with empty collecting lists; return the copy and its lists. Hooks
        collect there as usual, but nothing reaches the model."""
        context, collected = self._context.copy(), {}
        if self._variable and self._collector:
            # the collector contains settings in addition to lists
            fresh = {k: [] if isinstance(v, list) else v for k, v in self._collector.items()}
            context.run(self._variable.set, fresh)
            collected = _select_lists(fresh)
        return context, collected

    def give_to_model(self, collected: Collected) -> None:
        """Give the collected values to the model."""
        lists, self._put = collected
        for key, values in lists.items():
            self._collector[key].extend(values)
        if self._given is not None:
            self._given.fill(self._put)


def _select_lists(collector: dict[str, Any]) -> dict[str, list[Any]]:
    return {key: values for key, values in collector.items() if isinstance(values, list)}
