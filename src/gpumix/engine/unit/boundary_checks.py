"""Refusal of values that cannot cross a unit's boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.model.unit_values import PLAIN_TYPES
from gpumix.engine.unit.sharded_units import ShardedUnit


def refuse_inputs(unit: str, inputs: Sequence[Any]) -> None:
    """Raise a ModelError if an input of a unit cannot cross its boundary."""
    for value in _find_opaque_values(inputs):
        if type(value).__name__.endswith("Cache"):
            raise ModelError(
                f"unit '{unit}' is given a {type(value).__name__}",
                code="unit-input-unsupported",
                why="a cache remembers the first run of a unit, which is run again in backward",
                fix="set `use_cache=False` in the model's configuration",
            )
    _refuse_hidden(unit, inputs, "is given", lambda t: t.requires_grad)


def refuse_outputs(unit: ShardedUnit, outputs: Sequence[Any]) -> None:
    """Raise a ModelError if an output cannot cross the unit's boundary or is useless to the model.
    Parameters of the unit are invalid once the unit is done.

    A model that one plan can run, every plan can: the rules are those of the plan that shards most.
    """
    _refuse_hidden(unit.name, outputs, "returns", torch.Tensor.is_floating_point)
    tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
    if not tensors:
        raise ModelError(
            f"unit '{unit.name}' returns no tensor",
            code="unit-returns-no-tensor",
            why="its parameters get their gradients through what it returns",
            fix="return what it computes, or name other units: `model: {units: [MyBlock]}`",
        )
    full = unit.bucket.storages
    if any(t.layout == torch.strided and t.untyped_storage()._cdata in full for t in tensors):
        raise ModelError(
            f"unit '{unit.name}' returns one of its own parameters",
            code="unit-returns-parameter",
            why="its values are here while the unit is computed only",
            fix="return what is computed from it, or a `.clone()`",
        )


def _refuse_hidden(
    unit: str, values: Sequence[Any], verb: str, matters: Callable[[torch.Tensor], bool]
) -> None:
    """Refuse tensors inside objects that are no pytree. Such tensors cross the boundary unseen and
    would get no gradients."""
    for value in _find_opaque_values(values):
        if any(isinstance(t, torch.Tensor) and matters(t) for t in _list_contents(value)):
            kind = type(value).__name__
            raise ModelError(
                f"unit '{unit}' {verb} tensors inside of a {kind}",
                code="unit-container-unsupported",
                why="gradients cross the boundary in tensors, tuples, lists and dicts only",
                fix=f"make it one of those, or register it: "
                f"torch.utils._pytree.register_dataclass({kind})",
            )


def _find_opaque_values(values: Sequence[Any]) -> list[Any]:
    """Return the values of types that may contain further values."""
    return [value for value in values if type(value) not in PLAIN_TYPES]


def _list_contents(value: Any) -> list[Any]:
    """Return the visible contents of an object that is no pytree."""
    if isinstance(value, torch.Tensor | torch.nn.Module | type):
        return []
    held = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        names = getattr(kind, "__slots__", ())
        held += [getattr(value, n, None) for n in ([names] if isinstance(names, str) else names)]
    if isinstance(value, set | frozenset):
        held += value
    return tree_leaves(held)
