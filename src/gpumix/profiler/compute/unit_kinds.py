"""Separation of units of equal structure but different behavior, before measuring one of each kind.

The outputs of a block may depend on its number or on an object it has, and a model may give a block
fewer inputs than the previous block. Each unit's own forward is run without values, which takes
milliseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from itertools import count
from typing import Any

import torch

from gpumix.engine.model.forward_coroutine import UnitCall
from gpumix.engine.schedule.remote_stage_values import (
    Returned,
    TensorMeta,
    UnknownOutputError,
    hand_over,
    make_input_shape_key,
)
from gpumix.profiler.compute.unit_runner import WEIGHT_STD, UnitRunner


def separate_kinds(runner: UnitRunner, batch: Any) -> list[str]:
    """Make separate kinds of units with different inputs or outputs, and return the called units.

    Args:
        batch: a small batch, with tensors on the device.
    """
    assert runner.elsewhere is not None, (
        "a tensor-parallel group's units are of the kinds that one rank's are"
    )
    done: dict[str, set[object]] = defaultdict(set)
    computed: dict[str, Returned] = {}
    with runner.start(batch) as walk, runner.head_in_chunks():
        walk.go_on()
        while walk.call is not None:
            call, kind = walk.call, runner.kind_of[walk.call.unit]
            if kind not in computed:
                computed[kind] = runner.returned(call)
            try:
                returned = runner.elsewhere.returned(call)
            except UnknownOutputError:
                returned = computed[kind]  # assume the outputs of its kind
            looks = _describe_outputs(returned)
            done[call.unit].add((make_input_shape_key(call), looks))
            if looks == _describe_outputs(computed[kind]):
                returned = computed[kind]
            leaves = [_make_values(leaf, call, runner.device) for leaf in returned.leaves]
            walk.go_on(hand_over(call, returned, leaves))
    runner.divide(_assign_kinds(runner.kind_of, done))
    return walk.calls


def _assign_kinds(kind_of: Mapping[str, str], done: Mapping[str, Set[object]]) -> dict[str, str]:
    """Return the kind of each unit; the first of a kind, and units behaving like it, keep the
    name."""
    names: dict[tuple[str, frozenset[object]], str] = {}
    taken = set(kind_of.values())
    found = {}
    for unit, kind in kind_of.items():
        does = kind, frozenset(done.get(unit, ()))
        if does not in names:
            first = not any(known == kind for known, _ in names)
            names[does] = kind if first else _make_kind_name(kind, taken)
            taken.add(names[does])
        found[unit] = names[does]
    return found


def _make_kind_name(kind: str, taken: set[str]) -> str:
    base = kind.split("#")[0]
    return next(name for n in count(2) if (name := f"{base}#{n}") not in taken)


def _describe_outputs(returned: Returned) -> object:
    looks = (
        TensorMeta.of(leaf)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, TensorMeta | int | float | str | None)
        else type(leaf)
        for leaf in returned.leaves
    )
    return str(returned.structure), tuple(looks)


def _make_values(leaf: Any, call: UnitCall, device: torch.device) -> Any:
    """Return values to continue the model with: arbitrary values if only the look is known."""
    if isinstance(leaf, TensorMeta):
        values = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        values = values.normal_(0.0, WEIGHT_STD) if values.is_floating_point() else values
    elif isinstance(leaf, torch.Tensor):
        values = leaf.clone()
    else:
        return leaf
    return values.requires_grad_(call.state.gradients and values.is_floating_point())
