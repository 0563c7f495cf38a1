"""What a device of a class can do: every number of samples with every micro-batch and mode.

An option is (samples, micro-batch, mode) with its forward and backward seconds and its *capacity*,
the largest state share it leaves room for. Options that another one beats in all of these are
dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gpumix.cost.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.memory import Demands
from gpumix.cost.network import Links, free_links
from gpumix.cost.time import optimizer_seconds, pass_seconds, passes_meet
from gpumix.planner.setting import Setting
from gpumix.spec.plan import Mode

# Sums in another order differ in the last digits; limits are compared with this much slack.
TOLERANCE = 1e-12

EVERY = slice(None)


@dataclass(frozen=True)
class Limits:
    """The longest that any device may take for each part of a step, in seconds."""

    forward_s: float = float("inf")
    backward_s: float = float("inf")
    optimizer_s: float = float("inf")

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class ClassOptions:
    """The options of one class by growing samples, one array entry each.

    Where the passes of all ranks do not meet half-way, `forward_s` is both passes and `backward_s`
    nothing. `busy_s` is the time without communication: it decides between options that are equally
    good. `optimizer_s` is what one device would need for the whole state. `mode` indexes `modes`.
    `starts` is where each of the distinct sample counts `rows` begins.
    """

    name: str
    optimizer_s: float
    modes: tuple[Mode, ...]
    samples: IntArray
    micro_batch: IntArray
    mode: IntArray
    forward_s: FloatArray
    backward_s: FloatArray
    busy_s: FloatArray
    capacity: FloatArray
    rows: IntArray
    starts: IntArray

    def allowed(self, limits: Limits, span: slice = EVERY) -> npt.NDArray[np.bool_]:
        """Which options of `span` keep to the limits of the two passes."""
        slack = 1.0 + TOLERANCE
        return (self.forward_s[span] <= limits.forward_s * slack) & (
            self.backward_s[span] <= limits.backward_s * slack
        )

    def capacity_by_row(self, limits: Limits) -> FloatArray:
        """The largest capacity for each of `rows`; -1 where no option is allowed."""
        if not len(self.rows):
            return np.zeros(0)
        return np.maximum.reduceat(np.where(self.allowed(limits), self.capacity, -1.0), self.starts)

    def most_share(self, optimizer_s: float) -> float:
        """The largest share that a device updates in so many seconds."""
        if self.optimizer_s == 0:
            return 1.0
        return min(1.0, optimizer_s * (1.0 + TOLERANCE) / self.optimizer_s)

    @property
    def update_speed(self) -> float:
        """Shares per second that a device updates; infinite where the update takes no time."""
        return 1.0 / self.optimizer_s if self.optimizer_s > 0 else float("inf")

    def pick(self, samples: int, share: float, limits: Limits) -> int:
        """The least busy allowed option with so many samples and room for `share`.

        Ties go to the smaller micro-batch, then to the plainer mode. The caller knows that there
        is one.
        """
        row = int(np.searchsorted(self.rows, samples))
        end = self.starts[row + 1] if row + 1 < len(self.starts) else len(self.samples)
        span = slice(int(self.starts[row]), int(end))
        good = self.allowed(limits, span) & (self.capacity[span] >= share * (1.0 - TOLERANCE))
        return span.start + int(np.argmin(np.where(good, self.busy_s[span], np.inf)))


@dataclass(frozen=True)
class Member:
    """The devices of one class in a pool: so many, each to store at most `cap` of the state, or
    exactly that (`equal`)."""

    options: ClassOptions
    devices: int
    cap: float
    equal: bool

    def room_by_row(self, limits: Limits) -> FloatArray:
        """The largest share that may be stored beside each row of samples; -1 where none may."""
        capacity = self.options.capacity_by_row(limits)
        if self.equal:
            return np.where(capacity >= self.cap, self.cap, -1.0)
        return np.minimum(capacity, self.cap)

    def room_of(self, counts: npt.ArrayLike, limits: Limits) -> FloatArray:
        """The same for these numbers of samples."""
        return self.room_by_row(limits)[np.searchsorted(self.options.rows, counts)]


@dataclass(frozen=True)
class PoolOptions:
    """A pool, of which there are several `alike`."""

    members: tuple[Member, ...]
    alike: int


def pool_options(setting: Setting, options: Mapping[str, ClassOptions]) -> tuple[PoolOptions, ...]:
    """The pools of a setting with what their devices can do."""
    return tuple(
        PoolOptions(
            tuple(
                Member(
                    options[name],
                    len(devices[0]),
                    min(1.0, setting.cap / pool.size),
                    equal=setting.equal_shares and setting.zero_stage > 0,
                )
                for name, devices in pool.classes
            ),
            pool.alike,
        )
        for pool in setting.pools
    )


@dataclass(frozen=True)
class _Table:
    """All options of one mode: samples by row, micro-batch sizes by column."""

    forward_s: FloatArray
    backward_s: FloatArray
    busy_s: FloatArray
    capacity: FloatArray


Span = tuple[slice, slice]  # of rows and columns


class Cuts:
    """All cuts of up to `most` samples, by row, into micro-batches of `sizes`, by column; and what
    they hold in a setting, which is the same on devices of all classes."""

    def __init__(self, setting: Setting, most: int, sizes: IntArray) -> None:
        self.setting = setting
        self.sizes = sizes
        self._every = MicroBatches.of(np.arange(most + 1)[:, None], sizes)
        self._demands: dict[Mode, Demands] = {}

    def micro(self, span: Span) -> MicroBatches:
        """Some of them."""
        every = self._every
        return MicroBatches(every.size[span], every.full[span], every.rest[span])

    def demands(self, mode: Mode, span: Span) -> Demands:
        """What some of them take in a mode."""
        if mode not in self._demands:
            self._demands[mode] = self.setting.memory.demands(self._every, mode)
        every = self._demands[mode]
        return replace(every, fixed=every.fixed[:, *span], on_host=every.on_host[span])


def tabulate(cuts: Cuts, name: str, *, batch: int, largest: int, within_s: float) -> ClassOptions:
    """The options of class `name` for up to `batch` samples in micro-batches of up to `largest`.

    Options that take longer than `within_s` for both passes are left out.
    """
    setting, sizes = cuts.setting, cuts.sizes[cuts.sizes <= largest]
    modes, span = setting.modes_of(name), (slice(batch + 1), slice(len(sizes)))
    micro = cuts.micro(span)
    samples = np.broadcast_to(np.arange(batch + 1)[:, None], micro.size.shape)
    tables = [_table(cuts, name, span, mode) for mode in modes]
    forward = np.concatenate([t.forward_s for t in tables], axis=1)
    backward = np.concatenate([t.backward_s for t in tables], axis=1)
    busy = np.concatenate([t.busy_s for t in tables], axis=1)
    capacity = np.concatenate([t.capacity for t in tables], axis=1)
    # Of the sizes that take all samples at once only the first is an option of its own.
    distinct = np.tile(np.concatenate(([-1], sizes[:-1])) < samples, (1, len(modes)))
    valid = (capacity >= 0) & (forward + backward <= within_s) & distinct
    keep = valid & ~_dominated(valid, capacity, forward, backward, busy)
    every = np.tile(samples, (1, len(modes)))
    rows, starts = np.unique(every[keep], return_index=True)
    return ClassOptions(
        name=name,
        optimizer_s=0.0 if setting.zero_stage == 0 else optimizer_seconds(setting.profile, name),
        modes=modes,
        samples=every[keep],
        micro_batch=np.tile(micro.size, (1, len(modes)))[keep],
        mode=np.broadcast_to(np.repeat(np.arange(len(modes)), len(sizes)), every.shape)[keep],
        forward_s=forward[keep],
        backward_s=backward[keep],
        busy_s=busy[keep],
        capacity=capacity[keep],
        rows=rows,
        starts=starts,
    )


def _table(cuts: Cuts, name: str, span: Span, mode: Mode) -> _Table:
    setting, micro = cuts.setting, cuts.micro(span)
    forward, backward = _seconds(setting, name, setting.links, micro, mode)
    busy = forward + backward
    if not setting.links.take_no_time:
        free = free_links(setting.profile.model)
        busy = np.add(*_seconds(setting, name, free, micro, mode))
    return _Table(forward, backward, busy, setting.room(name, cuts.demands(mode, span)))


def _seconds(
    setting: Setting, name: str, links: Links, micro: MicroBatches, mode: Mode
) -> tuple[FloatArray, FloatArray]:
    forward, backward = pass_seconds(setting.profile, name, links, micro, mode)
    if passes_meet(setting.zero_stage):
        return forward, backward
    return forward + backward, np.zeros_like(backward)


class Paces:
    """The least seconds that a device needs for a sample, however it cuts them: without network and
    with any memory. Kept, for every setting of a search asks again."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._known: dict[tuple[str, tuple[Mode, ...]], float] = {}

    def seconds_per_sample(self, setting: Setting, name: str) -> float:
        modes = setting.modes_of(name)
        if (name, modes) not in self._known:
            sizes = np.arange(1, setting.largest_micro_batch(name, self._batch) + 1)
            one, free = MicroBatches.of(sizes, sizes), free_links(setting.profile.model)
            self._known[name, modes] = min(
                float((np.add(*_seconds(setting, name, free, one, mode)) / sizes).min())
                for mode in modes
            )
        return self._known[name, modes]

    def most_samples(self, setting: Setting, name: str, within_s: float) -> int:
        """More samples than this a device of class `name` cannot do in `within_s`."""
        if within_s == float("inf"):
            return self._batch
        per_sample = self.seconds_per_sample(setting, name)
        if per_sample * self._batch <= within_s:
            return self._batch
        return int(within_s / per_sample)

    def least_seconds(self, setting: Setting) -> float:
        """No passes of this setting take less: all devices at their best, or collectives alone."""
        speed = 0.0
        for name, devices in setting.classes.items():
            per_sample = self.seconds_per_sample(setting, name)
            speed += len(devices) / per_sample if per_sample > 0 else float("inf")
        # Who has no samples waits for the collectives, and so does every class alike.
        name, idle = next(iter(setting.classes)), MicroBatches.of([0], [0])
        mode = setting.modes_of(name)[0]
        moved = float(np.add(*_seconds(setting, name, setting.links, idle, mode))[0])
        return max(moved, self._batch / speed)


def _dominated(
    valid: npt.NDArray[np.bool_],
    capacity: FloatArray,
    forward: FloatArray,
    backward: FloatArray,
    busy: FloatArray,
) -> npt.NDArray[np.bool_]:
    """Which options another one with as many samples beats or equals in everything.

    Each row is walked from the largest capacity down. An option is compared with the three before
    it that have the least forward, the least backward and the least busy time: some dominated ones
    are overlooked, which costs only time, but none is dropped wrongly.
    """
    times = [np.where(valid, t, np.inf) for t in (forward, backward, busy)]
    order = np.lexsort((times[2], times[0] + times[1], -np.where(valid, capacity, -1.0)), axis=1)
    walked = [np.take_along_axis(t, order, axis=1) for t in times]
    beaten = np.zeros(valid.shape, dtype=bool)
    for key in walked:
        best = _best_before(key)
        others = [np.take_along_axis(t, np.maximum(best, 0), axis=1) for t in walked]
        beaten |= (best >= 0) & np.all([t >= o for t, o in zip(walked, others)], axis=0)
    result = np.zeros(valid.shape, dtype=bool)
    np.put_along_axis(result, order, beaten, axis=1)
    return result


def _best_before(key: FloatArray) -> IntArray:
    """For each entry of a row the place of the least key before it, -1 for the first."""
    least = np.minimum.accumulate(key, axis=1)
    fresh = np.ones(key.shape, dtype=bool)
    fresh[:, 1:] = key[:, 1:] < least[:, :-1]
    places = np.where(fresh, np.arange(key.shape[1]), -1)
    latest = np.maximum.accumulate(places, axis=1)
    before = np.full(key.shape, -1)
    before[:, 1:] = latest[:, :-1]
    return before
