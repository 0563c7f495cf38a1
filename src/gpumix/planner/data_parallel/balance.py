"""The part of each device, from the limits of the fastest choice.

The limits usually allow more samples than the batch has. The surplus is removed where the busiest
device becomes least busy. The state is then spread as evenly as room and the update's limit allow.
Each device runs the micro-batch and mode keeping it least busy. Devices of a class are alike: the
first by id gets the most samples. Ties go by class name, then device id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpumix.cost.memory_layout.curves import FloatArray, IntArray
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.planner.common.strategy import DevicePart
from gpumix.planner.data_parallel.branch_and_bound import SampleLimits, find_fill_level
from gpumix.planner.data_parallel.class_options import PoolMember, PoolOptions, TimeLimits


@dataclass(frozen=True)
class _ClassDevices:
    """The devices of one class in all like pools.

    `most` has shape [pools, devices]; `work_s` has one entry per row of the class's options.
    """

    member: PoolMember
    most: IntArray
    work_s: FloatArray


def assign_parts(
    setting: ShardingSetting, pools: Sequence[PoolOptions], choice: SampleLimits, batch: int
) -> dict[str, DevicePart]:
    """Return the part of each device by id."""
    rows = [
        _ClassDevices(member, _repeat_limits(runs, pool.alike), _least_work(member, choice.limits))
        for pool, chosen in zip(pools, choice.samples)
        for member, runs in zip(pool.members, chosen)
    ]
    counts = iter(_balance_samples(rows, batch))
    given: dict[str, DevicePart] = {}
    for pool, kind in zip(pools, setting.pools):
        of_pool = [next(counts) for _ in pool.members]
        shares = _divide_state(setting, pool, of_pool, choice.limits)
        for member, (_, devices), samples, share in zip(
            pool.members, kind.classes, of_pool, shares
        ):
            made: dict[tuple[int, float], DevicePart] = {}
            for names, some, parts_of in zip(devices, samples.tolist(), share.tolist()):
                for device, n, s in zip(names, some, parts_of):
                    if (n, s) not in made:
                        made[n, s] = _part(member, n, s, choice.limits)
                    given[device.id] = made[n, s]
    return given


def _repeat_limits(runs: Sequence[tuple[int, int]], alike: int) -> IntArray:
    """Return the most samples of each device, largest first, repeated for all like pools."""
    each = np.repeat([n for n, _ in runs], [count for _, count in runs])
    return np.tile(np.sort(each)[::-1], (alike, 1))


def _balance_samples(rows: Sequence[_ClassDevices], batch: int) -> list[IntArray]:
    """Choose samples adding up to `batch`, within the choice, with the busiest device least
    busy."""
    levels = np.unique(np.concatenate([row.work_s for row in rows]))
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(int(_limit_samples(row, float(levels[middle])).sum()) for row in rows) >= batch:
            high = middle
        else:
            low = middle + 1
    floor = float(levels[low - 1]) if low else -1.0
    counts = [_limit_samples(row, float(levels[low])) for row in rows]
    return _remove_surplus(counts, [_limit_samples(row, floor) for row in rows], batch)


def _least_work(member: PoolMember, limits: TimeLimits) -> FloatArray:
    """Return the least seconds of work for each row of samples, never falling with more samples."""
    options = member.options
    allowed = np.where(options.allowed(limits), options.work_s, np.inf)
    least: FloatArray = np.minimum.reduceat(allowed, options.starts)
    rising: FloatArray = np.minimum.accumulate(least[::-1])[::-1]
    return rising


def _limit_samples(row: _ClassDevices, seconds: float) -> IntArray:
    """Return the most samples each device does in `seconds` without exceeding the choice."""
    place = int(np.searchsorted(row.work_s, seconds, side="right")) - 1
    reach = int(row.member.options.rows[place]) if place >= 0 else 0
    return np.minimum(row.most, reach)


def _remove_surplus(counts: list[IntArray], floor: list[IntArray], batch: int) -> list[IntArray]:
    """Remove the surplus: in each round a sample of every device above its floor, the last
    first."""
    taken = np.concatenate([c.ravel() for c in counts])
    least = np.concatenate([f.ravel() for f in floor])
    surplus = int(taken.sum()) - batch
    while surplus > 0:
        above = np.flatnonzero(taken > least)[::-1][:surplus]
        taken[above] -= 1
        surplus -= len(above)
    ends = np.cumsum([c.size for c in counts])[:-1]
    return [
        -np.sort(-part.reshape(c.shape), axis=1) for part, c in zip(np.split(taken, ends), counts)
    ]


def _divide_state(
    setting: ShardingSetting, pool: PoolOptions, counts: Sequence[IntArray], limits: TimeLimits
) -> Iterator[FloatArray]:
    """Return state shares, as even as the room next to the samples and the update's limit allow."""
    width = [c.shape[1] for c in counts]
    if setting.zero_stage == 0:
        whole = sum(c.size for c in counts)
        return (np.full(c.shape, 1.0 / whole) for c in counts)
    room = np.concatenate([m.room_of(c, limits) for m, c in zip(pool.members, counts)], axis=1)
    speed = np.repeat([m.options.update_speed for m in pool.members], width)
    filled: dict[bytes, FloatArray] = {}
    for most in room:  # of like pools, and mostly equal
        if most.tobytes() not in filled:
            filled[most.tobytes()] = _fill_shares(most, speed, pool, width)
    shares = np.stack([filled[most.tobytes()] for most in room])
    return iter(np.split(shares, np.cumsum(width)[:-1], axis=1))


def _fill_shares(
    room: FloatArray, speed: FloatArray, pool: PoolOptions, width: Sequence[int]
) -> FloatArray:
    update = find_fill_level(room, speed)
    pace = np.repeat([m.options.most_share(update) for m in pool.members], width)
    most: FloatArray = np.minimum(room, pace)
    return most.clip(max=find_fill_level(most, np.ones(len(most))))


def _part(member: PoolMember, samples: int, share: float, limits: TimeLimits) -> DevicePart:
    options = member.options
    option = options.pick(samples, share, limits)
    return DevicePart(
        samples, int(options.micro_batch[option]), share, options.modes[options.mode[option]]
    )
