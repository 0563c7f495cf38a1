"""A quick test of a setting's room for state and batch, for any batch, without times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpumix.cost.memory_layout.curves import MicroBatches
from gpumix.cost.peak_memory import Activations
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.planner.data_parallel.class_options import (
    ClassOptions,
    PoolOptions,
    TimeLimits,
    list_pool_options,
)
from gpumix.planner.data_parallel.knapsack import (
    FULL_STATE_SHARE,
    Undecided,
    build_staircase,
    select_in_pools,
)
from gpumix.schema.plan.stage import Mode

SAMPLE_COUNTS = 128  # numbers of samples tried


class FeasibilityTest:
    """The test for settings of a batch, with activations counted once for all of them."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        first = np.append(np.geomspace(1, batch, SAMPLE_COUNTS).astype(np.int64), 0)
        self._first = np.unique(first)
        self._last = np.append(self._first[1:] - 1, batch)
        self._ones = MicroBatches.of(self._first, 1)
        self._held: dict[tuple[int, Mode], Activations] = {}

    def can_fit(self, setting: ShardingSetting) -> bool:
        """Return False only if no choice of samples, micro-batches and modes has room.

        Samples run in micro-batches of one, which take the least memory, and are counted in steps:
        the room next to the first number of a step is lent to the last number.
        """
        if not setting.memory.is_size_one_smallest(self._batch):
            return True
        options = {name: self._build_roomiest_options(setting, name) for name in setting.classes}
        return may_select(list_pool_options(setting, options), self._batch)

    def can_hold_state(self, setting: ShardingSetting) -> bool:
        """Return True if the state has room where no device has samples, in any mode alike."""
        nothing = MicroBatches.of([0], [1])
        for pool in setting.pools:
            reached = 0.0
            for name, devices in pool.classes:
                held = Activations(setting.profile.model_of(name), nothing, setting.modes[name][0])
                reached += len(devices[0]) * float(setting.room(name, held)[0])
            if reached < FULL_STATE_SHARE:
                return False
        return True

    def _build_roomiest_options(self, setting: ShardingSetting, name: str) -> ClassOptions:
        """Return the most room of a class in any mode, as options taking no time."""
        rooms = [setting.room(name, self._count(setting, name, m)) for m in setting.modes[name]]
        nothing = np.zeros(len(self._last))
        return ClassOptions(
            name=name,
            optimizer_s=0.0,
            modes=setting.modes[name],
            samples=self._last,
            micro_batch=np.minimum(self._last, 1),
            mode=np.zeros(len(self._last), np.int64),
            forward_s=nothing,
            backward_s=nothing,
            work_s=nothing,
            capacity=np.max(rooms, axis=0),
            rows=self._last,
            starts=np.arange(len(self._last)),
        )

    def _count(self, setting: ShardingSetting, name: str, mode: Mode) -> Activations:
        model = setting.profile.model_of(name)
        key = (id(model), mode)  # the activations keep the model alive
        if key not in self._held:
            self._held[key] = Activations(model, self._ones, mode)
        return self._held[key]


def may_select(pools: Sequence[PoolOptions], batch: int) -> bool:
    """Return False only if no choice of options, however slow, has room for state and batch."""
    anything = TimeLimits()
    stairs = [
        [build_staircase(m, m.room_by_row(anything), anything.optimizer_s) for m in pool.members]
        for pool in pools
    ]
    try:
        return select_in_pools(pools, stairs, batch) is not None
    except Undecided:
        return True
