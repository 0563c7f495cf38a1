"""A plan dividing nothing but samples, evenly: for a model without anything to train.

No training step exists to be measured. Each rank keeps the full model, as under
`DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gpumix.engine.model.module_buffers import BufferCopies, find_buffer_owners
from gpumix.engine.model.rng import use_eval_mode
from gpumix.engine.rehearsal.module_attributes import preserve_attributes
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.integrations.common.batch_rows import split_rows_equally
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import ComputeDtype
from gpumix.testing.plans import Share, plan_for


def make_even_plan(
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
    calls = record_unit_calls(model, run)
    counts = [len(split_rows_equally(world, rank, global_batch)[0]) for rank in range(world)]
    return plan_for(
        model,
        [Share(count, max(count, 1), 1) for count in counts],
        calls=calls,
        units=select_called_units(model, calls),
        zero_stage=0,
        compute_dtype=compute_dtype,
    )


@torch.no_grad()
def record_unit_calls(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Return the units called in a run of a model, in order; without any calls, all units as
    registered."""
    calls: list[str] = []
    units = split_into_units(model).units
    copies = BufferCopies(find_buffer_owners(model))
    hooks = [
        unit.module.register_forward_pre_hook(lambda *_, name=unit.name: calls.append(name))
        for unit in units
    ]
    try:
        with use_eval_mode(model), preserve_attributes(model):
            run()
    finally:
        for hook in hooks:
            hook.remove()
        copies.keep_changed()
        copies.restore()
    return calls or [unit.name for unit in units]


def select_called_units(model: nn.Module, calls: Sequence[str]) -> list[str]:
    """Return the units of a plan with these calls; empty if all units are called. Units never
    called are gathered with the root, as after a profile."""
    units = [unit.name for unit in split_into_units(model).units]
    return [name for name in units if name in calls] if {*units} != {*calls} else []
