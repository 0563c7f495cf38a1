"""Cephalo's plan (ICS 2025): a dynamic program over devices, batch and micro-batches.

DP[i][j][s] is the least time of the slowest of i devices, for j samples in all and micro-batch
sizes that add up to s. Each device runs l >= 1 equal micro-batches of m samples. The sum s stands
for activation memory: over all s, the fastest solution counts that leaves the devices together
enough room for the state. The state is then spread as evenly as room allows. ZeRO-3 with recompute,
inputs kept on the host where possible. A device whose micro-batch leaves no room for an equal share
moves its state by the slower unequal collectives.

The work grows with devices x batch^3 x log(batch). A large batch is therefore divided by a factor:
samples come in groups of `factor` micro-batches, and the excess of the last group is taken off the
device that is busy longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gpumix.cost.memory_layout.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.step_time import compute_pass_seconds
from gpumix.planner.common.class_split import ClassSplit
from gpumix.planner.common.policy_shortage import compute_shortage, make_policy_error
from gpumix.planner.common.score import DeviceLoad, compute_share_capacities
from gpumix.planner.common.sharding_setting import ShardingSetting, make_setting
from gpumix.planner.common.strategy import PlanRequest, list_devices_by_rank
from gpumix.planner.data_parallel.branch_and_bound import find_fill_level
from gpumix.planner.data_parallel.knapsack import FULL_STATE_SHARE
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile

# Limit on the work of one plan, in table cells visited (some tenths of a second); and the fixed
# cost of visiting any number of cells, in cells.
MAX_CELLS = 400_000_000
CELLS_PER_VISIT = 5_000


def plan_cephalo(profile: Profile, request: PlanRequest) -> Plan:
    """Plan by Cephalo's rules, at the smallest factor with affordable work.

    Raises:
        InputError: there are fewer samples than devices, too many of both, or the space or the
            profile lacks what it needs.
        NoFeasiblePlanError: no solution leaves room for the state.
    """
    task = _Task.of(profile, request)
    return task.plan(task.factor())


def plan_at_factor(profile: Profile, request: PlanRequest, *, factor: int = 1) -> Plan:
    """Plan by Cephalo's rules at a given factor, regardless of run time; factor 1 is exact.

    Raises:
        InputError: as `cephalo`, or the factor leaves a device without samples.
        NoFeasiblePlanError: no solution leaves room for the state.
    """
    return _Task.of(profile, request).plan(factor)


@dataclass(frozen=True)
class _Options:
    """Options of a device of one class: `number` micro-batches of `size`, times the factor.

    `even` marks options leaving room for an equal share. `room` is the largest share next to each
    if shares are unequal, -1 without room. Sorted by size, then number.
    """

    size: IntArray
    number: IntArray
    seconds: FloatArray
    even: npt.NDArray[np.bool_]
    room: FloatArray


@dataclass(frozen=True)
class _Task:
    """A planning task: settings with equal and with unequal shares, and the mode of each class."""

    equal: ShardingSetting
    unequal: ShardingSetting
    modes: Mapping[str, Mode]
    batch: int

    @classmethod
    def of(cls, profile: Profile, request: PlanRequest) -> _Task:
        devices = list_devices_by_rank(profile, request)
        if request.global_batch < len(devices):
            raise InputError(
                f"a global batch of {request.global_batch} has no sample for each of "
                f"{len(devices)} devices, as Cephalo requires",
                code="cephalo-batch-too-small",
                fix=f"set `global_batch_size` to {len(devices)} or more, or use "
                "`strategy: optimal`",
            )
        modes = _modes(profile, request, devices)
        equal, unequal = (
            make_setting(profile, devices, cap=cap, modes=modes) for cap in (1.0, float("inf"))
        )
        of_class = {name: equal.modes[name][0] for name in equal.classes if equal.modes[name]}
        if lacking := set(equal.classes) - set(of_class):
            raise InputError(
                f"the profile does not say what class '{min(lacking)}' takes to keep its inputs "
                "where they may be kept",
                code="profile-mode-missing",
                fix="profile again on this cluster: `gpumix profile JOB.yaml`",
            )
        return cls(equal, unequal, of_class, request.global_batch)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Class of each device, in the order of the dynamic program."""
        return tuple(name for name, devices in self.equal.classes.items() for _ in devices)

    def factor(self) -> int:
        """Return the smallest factor with affordable work."""
        ranks = len(self.names)
        low, high = 1, (self.batch - 1) // (ranks - 1) if ranks > 1 else self.batch
        if self._work(high) > MAX_CELLS:
            raise InputError(
                f"Cephalo's search was not run for {ranks} devices and a batch of {self.batch}: "
                "its work grows with devices x batch^2 and more",
                code="cephalo-search-too-large",
                why=f"with the batch divided by {high} it still takes "
                f"{self._work(high) / MAX_CELLS:.2g} times the work that is allowed",
                fix="use `strategy: optimal`, whose work grows with the number of classes",
            )
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._work(middle) <= MAX_CELLS else (middle + 1, high)
        return low

    def plan(self, factor: int) -> Plan:
        """Return the plan of the best solution at `factor`."""
        solution = self._solution(factor)
        if solution is None:
            samples = -(-self.batch // len(self.names))
            lacks = {
                name: compute_shortage(self.equal, name, m, samples)
                for name, m in self.modes.items()
            }
            raise make_policy_error("a plan by Cephalo's rules", [(self.equal, lacks)])
        return self._division(solution, factor).plan("cephalo")

    def _work(self, factor: int) -> float:
        width = self._width(factor)
        work = 0.0
        for name, devices in self.equal.classes.items():
            size, number = _list_micro_batch_splits(
                width + 1, self.equal.largest_micro_batch(name, width + 1)
            )
            cells = (width + 2.0 - size * number) ** 2
            work += len(devices) * float((cells + CELLS_PER_VISIT).sum())
        return work

    def _width(self, factor: int) -> int:
        """Return the number of sample groups beyond the first group of each device."""
        return -(-self.batch // factor) - len(self.names)

    def _solution(self, factor: int) -> tuple[tuple[_Options, int], ...] | None:
        """Return the option of each device; None if no solution leaves room for the state."""
        width = self._width(factor)
        if width < 0:
            raise InputError(
                f"a batch of {self.batch} by a factor of {factor} leaves less than a group of "
                f"samples for each of {len(self.names)} devices",
                code="cephalo-factor-too-large",
            )
        options = {name: self._options(name, width + 1, factor) for name in self.equal.classes}
        of_device = [options[name] for name in self.names]
        for solution in iterate_solutions(of_device, width):
            chosen = tuple(zip(of_device, solution))
            if _all_even(chosen) or _room_for_state(chosen):
                return chosen
        return None

    def _options(self, name: str, most: int, factor: int) -> _Options:
        size, number = _list_micro_batch_splits(most, self.equal.largest_micro_batch(name, most))
        micro, mode = MicroBatches.of(size * number * factor, size), self.modes[name]
        even = compute_share_capacities(self.equal, name, micro, mode) >= 1.0 / len(self.names)
        room = compute_share_capacities(self.unequal, name, micro, mode)
        fits = even | (room >= 0)
        evenly, unevenly = (
            np.add(*compute_pass_seconds(setting.profile, name, setting.links, micro, mode))
            for setting in (self.equal, self.unequal)
        )
        seconds = np.where(even, evenly, unevenly)
        return _Options(size[fits], number[fits], seconds[fits], even[fits], room[fits])

    def _division(self, solution: Sequence[tuple[_Options, int]], factor: int) -> ClassSplit:
        setting = self.equal if _all_even(solution) else self.unequal
        shares = _shares(solution)
        samples = [int(o.size[k] * o.number[k]) * factor for o, k in solution]
        seconds = [float(options.seconds[k]) for options, k in solution]
        samples[int(np.argmax(seconds))] -= sum(samples) - self.batch
        loads = Counter(
            DeviceLoad(name, count, int(o.size[k]), share, self.modes[name])
            for name, count, share, (o, k) in zip(self.names, samples, shares, solution)
        )
        return ClassSplit(setting, tuple(loads.items()))


def _modes(profile: Profile, request: PlanRequest, devices: tuple[Device, ...]) -> tuple[Mode, ...]:
    """Return the recompute modes of the space, inputs kept on the host first."""
    space = request.space
    modes = [
        mode
        for mode in space.modes(3)
        if mode.recompute and mode.order == "layered" and mode.head == "whole"
    ]
    if 3 not in space.zero_stages or "all" not in space.shardings or not modes:
        raise InputError(
            "Cephalo plans ZeRO-3 with recompute over all devices, which is not allowed here",
            code="cephalo-mode-not-allowed",
            fix="allow it, or use `strategy: optimal`",
        )
    return tuple(sorted(modes, key=lambda mode: mode.boundary != "host"))


def _list_micro_batch_splits(most: int, largest: int) -> tuple[IntArray, IntArray]:
    """Return sizes and numbers of equal micro-batches with at most `most` samples in all."""
    sizes = np.arange(1, largest + 1)
    each = most // sizes
    size = np.repeat(sizes, each)
    return size, np.arange(1, len(size) + 1) - np.repeat(np.cumsum(each) - each, each)


def _all_even(solution: Sequence[tuple[_Options, int]]) -> bool:
    return all(bool(options.even[k]) for options, k in solution)


def _room_for_state(solution: Sequence[tuple[_Options, int]]) -> bool:
    rooms = [float(options.room[k]) for options, k in solution]
    return min(rooms) >= 0 and sum(rooms) >= FULL_STATE_SHARE


def _shares(solution: Sequence[tuple[_Options, int]]) -> list[float]:
    """Return shares as even as the room allows."""
    if _all_even(solution):
        return [1.0 / len(solution)] * len(solution)
    room = np.asarray([options.room[k] for options, k in solution])
    return [float(share) for share in room.clip(max=find_fill_level(room, np.ones(len(room))))]


# -- the dynamic program ---------------------------------------------------------------------------


def iterate_solutions(devices: Sequence[_Options], width: int) -> Iterator[tuple[int, ...]]:
    """Yield the fastest solution of each sum of sizes, as the option of each device; the fastest
    sum first, on ties the smallest.

    Ties between options go to the smaller, then the fewer, micro-batches.
    """
    tables = _fill_tables(devices, width)
    totals = tables[-1][width]
    for sizes in np.argsort(totals, kind="stable"):
        if np.isfinite(totals[sizes]):
            yield _trace_back(devices, tables, width, int(sizes))


def _fill_tables(devices: Sequence[_Options], width: int) -> list[FloatArray]:
    """Return, after each device, the least time of the slowest, by samples and by sum of sizes.

    Both count beyond the first sample of each device; sizes add up to no more than samples.
    """
    tables = [np.full((width + 1, width + 1), np.inf)]
    tables[0][0, 0] = 0.0
    scratch = np.empty((width + 1, width + 1))
    for options in devices:
        before, after = tables[-1], np.full((width + 1, width + 1), np.inf)
        samples = options.size * options.number - 1
        for n, m, seconds in zip(
            samples.tolist(), (options.size - 1).tolist(), options.seconds.tolist()
        ):
            rest = width + 1 - n
            some, taken = scratch[:rest, :rest], after[n:, m : m + rest]
            np.maximum(before[:rest, :rest], seconds, out=some)
            np.minimum(taken, some, out=taken)
        tables.append(after)
    return tables


def _trace_back(
    devices: Sequence[_Options], tables: Sequence[FloatArray], samples: int, sizes: int
) -> tuple[int, ...]:
    """Trace back the option of each device leading to the given samples and sizes."""
    chosen = []
    for options, before in zip(reversed(devices), reversed(tables[:-1])):
        n, m = samples - (options.size * options.number - 1), sizes - (options.size - 1)
        possible = (n >= 0) & (m >= 0)
        times = np.maximum(before[np.maximum(n, 0), np.maximum(m, 0)], options.seconds)
        option = int(np.argmin(np.where(possible, times, np.inf)))
        chosen.append(option)
        samples, sizes = int(n[option]), int(m[option])
    return tuple(reversed(chosen))
