"""A plan dividing nothing but samples, evenly: for a model without anything to train.

No training step exists to be measured. Each rank keeps the full model, as under
`DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gpumix.engine.model.module_buffers import BufferCopies, keepers
from gpumix.engine.model.rng import evaluating
from gpumix.engine.rehearsal.module_attributes import attributes_kept
from gpumix.engine.sharding.unit_discovery import dissect
from gpumix.integrations.common.batch_rows import equal_rows
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import ComputeDtype
from gpumix.testing.plans import Share, plan_for


def even_plan(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    world: int,
    global_batch: int,
    compute_dtype: ComputeDtype,
) -> Plan:
    """Plan for an equal share of samples on each rank.

    Args:
        run: computes a batch with the model, to find the order of calls of blocks.
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
    """Return the units called in a run of a model, in order; without any calls, all units as
    registered."""
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
    """Return the units of a plan with these calls; empty if all units are called. Units never
    called are gathered with the root, as after a profile."""
    units = [unit.name for unit in dissect(model).units]
    return [name for name in units if name in calls] if {*units} != {*calls} else []
