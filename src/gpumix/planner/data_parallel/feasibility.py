"""A quick test of a setting's room for state and batch, for any batch, without times."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpumix.cost.layout.curves import IntArray, MicroBatches
from gpumix.cost.peak_memory import Activations
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.planner.data_parallel.class_options import ClassOptions, TimeLimits, pool_options
from gpumix.planner.data_parallel.knapsack import Undecided, build_staircase, select_in_pools
from gpumix.schema.plan.stage import Mode

SAMPLE_COUNTS = 128  # numbers of samples tried


def can_fit(setting: ShardingSetting, batch: int) -> bool:
    """Return False only if no choice of samples, micro-batches and modes has room.

    Samples run in micro-batches of one, which take the least memory, and are counted in steps: the
    room next to the first number of a step is lent to the last number.
    """
    if not setting.memory.is_size_one_smallest(batch):
        return True
    first = np.unique(np.append(np.geomspace(1, batch, SAMPLE_COUNTS).astype(np.int64), 0))
    ones = MicroBatches.of(first, 1)
    held = _build_activations(setting, ones)
    last = np.append(first[1:] - 1, batch)
    options = {name: _build_roomiest_options(setting, name, last, held) for name in setting.classes}
    pools, anything = pool_options(setting, options), TimeLimits()
    stairs = [
        [build_staircase(m, m.room_by_row(anything), anything.optimizer_s) for m in pool.members]
        for pool in pools
    ]
    try:
        return select_in_pools(pools, stairs, batch) is not None
    except Undecided:
        return True


def _build_activations(
    setting: ShardingSetting, ones: MicroBatches
) -> dict[tuple[int, Mode], Activations]:
    """Return the activations of each model, by identity, and of each mode."""
    models = {name: setting.profile.model_of(name) for name in setting.classes}
    ways = {
        (id(model), mode): model for name, model in models.items() for mode in setting.modes[name]
    }
    return {(key, mode): Activations(model, ones, mode) for (key, mode), model in ways.items()}


def _build_roomiest_options(
    setting: ShardingSetting,
    name: str,
    samples: IntArray,
    held: Mapping[tuple[int, Mode], Activations],
) -> ClassOptions:
    """Return the most room of a class in any mode, as options taking no time."""
    model = id(setting.profile.model_of(name))
    rooms = [setting.room(name, held[model, mode]) for mode in setting.modes[name]]
    nothing = np.zeros(len(samples))
    return ClassOptions(
        name=name,
        optimizer_s=0.0,
        modes=setting.modes[name],
        samples=samples,
        micro_batch=np.minimum(samples, 1),
        mode=np.zeros(len(samples), np.int64),
        forward_s=nothing,
        backward_s=nothing,
        work_s=nothing,
        capacity=np.max(rooms, axis=0),
        rows=samples,
        starts=np.arange(len(samples)),
    )
