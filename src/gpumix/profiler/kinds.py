"""Units of one structure that do not do alike, told apart before one of each kind is measured.

What a block returns may go by its number, or by an object that it has; and a model may give a block
less than the one before. Each unit's own forward is run without values, which takes milliseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from itertools import count
from typing import Any

import torch

from gpumix.engine.coroutine import UnitCall
from gpumix.engine.elsewhere import Look, Returned, Untold, given_looks, hand_over
from gpumix.profiler.specimen import WEIGHT_STD, Specimens


def tell_apart(specimens: Specimens, batch: Any) -> list[str]:
    """Make kinds of their own of units that are given, or return, what looks otherwise than what
    others of their kind do. Gives the units that the model called.

    Args:
        batch: a small one, whose tensors are on the device.
    """
    assert specimens.elsewhere is not None, "a team's units are of the kinds that one rank's are"
    done: dict[str, set[object]] = defaultdict(set)
    computed: dict[str, Returned] = {}
    with specimens.start(batch) as walk, specimens.head_in_chunks():
        walk.go_on()
        while walk.call is not None:
            call, kind = walk.call, specimens.kind_of[walk.call.unit]
            if kind not in computed:
                computed[kind] = specimens.returned(call)
            try:
                returned = specimens.elsewhere.returned(call)
            except Untold:
                returned = computed[kind]  # as others of its kind do
            looks = _looks(returned)
            done[call.unit].add((given_looks(call), looks))
            if looks == _looks(computed[kind]):
                returned = computed[kind]
            leaves = [_values(leaf, call, specimens.device) for leaf in returned.leaves]
            walk.go_on(hand_over(call, returned, leaves))
    specimens.divide(_kinds(specimens.kind_of, done))
    return walk.calls


def _kinds(kind_of: Mapping[str, str], done: Mapping[str, Set[object]]) -> dict[str, str]:
    """Of each unit; the first one of a kind, and those that do as it does, keep it."""
    names: dict[tuple[str, frozenset[object]], str] = {}
    taken = set(kind_of.values())
    found = {}
    for unit, kind in kind_of.items():
        does = kind, frozenset(done.get(unit, ()))
        if does not in names:
            first = not any(known == kind for known, _ in names)
            names[does] = kind if first else _another(kind, taken)
            taken.add(names[does])
        found[unit] = names[does]
    return found


def _another(kind: str, taken: set[str]) -> str:
    base = kind.split("#")[0]
    return next(name for n in count(2) if (name := f"{base}#{n}") not in taken)


def _looks(returned: Returned) -> object:
    looks = (
        Look.of(leaf)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, Look | int | float | str | None)
        else type(leaf)
        for leaf in returned.leaves
    )
    return str(returned.structure), tuple(looks)


def _values(leaf: Any, call: UnitCall, device: torch.device) -> Any:
    """What the model goes on with: where only looks are known, any values."""
    if isinstance(leaf, Look):
        values = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        values = values.normal_(0.0, WEIGHT_STD) if values.is_floating_point() else values
    elif isinstance(leaf, torch.Tensor):
        values = leaf.clone()
    else:
        return leaf
    return values.requires_grad_(call.state.gradients and values.is_floating_point())
