"""A plan that divides nothing but samples, evenly: for a model that trains nothing.

There is no step that could be measured to plan by. Each rank keeps the whole model, as under
`DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gpumix.engine.attributes import attributes_kept
from gpumix.engine.buffers import BufferCopies, keepers
from gpumix.engine.randomness import evaluating
from gpumix.engine.units import dissect
from gpumix.integrations.rows import equal_rows
from gpumix.spec.plan import Plan
from gpumix.spec.stage import ComputeDtype
from gpumix.testing import Share, plan_for


def even_plan(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    world: int,
    global_batch: int,
    compute_dtype: ComputeDtype,
) -> Plan:
    """
    Args:
        run: computes a batch by the model, for the order in which it calls its blocks.
    """
    calls = calls_of(model, run)
    counts = [len(equal_rows(world, rank, global_batch)[0]) for rank in range(world)]
    return plan_for(
        model,
        [Share(count, max(count, 1), 1) for count in counts],
        calls=calls,
        units=called_of(model, calls),
        zero_stage=0,
        compute_dtype=compute_dtype,
    )


@torch.no_grad()
def calls_of(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """The units that a model calls in a run of it, in order; all, as they are registered, if it
    calls none."""
    calls: list[str] = []
    units = dissect(model).units
    copies = BufferCopies(keepers(model))
    hooks = [
        unit.module.register_forward_pre_hook(lambda *_, name=unit.name: calls.append(name))
        for unit in units
    ]
    try:
        with evaluating(model), attributes_kept(model):
            run()
    finally:
        for hook in hooks:
            hook.remove()
        copies.keep_changed()
        copies.restore()
    return calls or [unit.name for unit in units]


def called_of(model: nn.Module, calls: Sequence[str]) -> list[str]:
    """The units of a plan with these calls, empty if they are all: units that are not called are
    gathered with the rest, as after a profile."""
    units = [unit.name for unit in dissect(model).units]
    return [name for name in units if name in calls] if {*units} != {*calls} else []
