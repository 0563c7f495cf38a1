"""Options of a device of a class: every number of samples with every micro-batch and mode.

An option is (samples, micro-batch, mode) with its forward and backward seconds and its *capacity*,
the largest state share that still has room. Of many options, those beaten by another option in all
of these are dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property, reduce
from math import ceil, floor

import numpy as np
import numpy.typing as npt

from gpumix.cost.identity import ByIdentity
from gpumix.cost.memory_layout.curves import FloatArray, IntArray, MicroBatches
from gpumix.cost.network.buckets import ONE_UNIT_PER_BUCKET, build_buckets
from gpumix.cost.network.collective_times import CollectiveSeconds, make_free_collectives
from gpumix.cost.peak_memory import Activations, MemoryModel, compute_free_bytes
from gpumix.cost.step_time import (
    compute_pass_seconds,
    compute_work_seconds,
    needs_sync_between_passes,
)
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import ZeroStage
from gpumix.schema.plan.stage import Mode, Place
from gpumix.schema.profile.profile import Profile

FEW_ROWS = 48  # up to this many samples, all ways to cut them are tried to bound a setting

FEW_SIZES = 96  # micro-batch sizes tried to see which have room at all

MIN_OPTIONS_TO_THIN = 4096  # options; dropping any of fewer takes longer than looking through all

MOST_CELLS = 2_000_000  # of a grid; a cell takes half a kilobyte while in use

MOST_GRIDS = 16  # kept for the next settings

ROWS_AT_ONCE = 16  # rows of grids are rounded to multiples of this

# Sums in another order differ in the last digits; limits are compared with this much slack.
TOLERANCE = 1e-12

EVERY = slice(None)


@dataclass(frozen=True)
class TimeLimits:
    """The longest time of any device for each part of a step, in seconds."""

    forward_s: float = float("inf")
    backward_s: float = float("inf")
    optimizer_s: float = float("inf")

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class ClassOptions:
    """The options of one class by growing samples, an array entry each.

    If ranks do not synchronize between the passes, `forward_s` has both passes and `backward_s` is
    zero. `work_s` is computing and copying: it decides between equally good options. `optimizer_s`
    is the time of one device to update the whole state. `mode` indexes `modes`. `starts` has the
    first entry of each of the distinct sample counts `rows`.
    """

    name: str
    optimizer_s: float
    modes: tuple[Mode, ...]
    samples: IntArray
    micro_batch: IntArray
    mode: IntArray
    forward_s: FloatArray
    backward_s: FloatArray
    work_s: FloatArray
    capacity: FloatArray
    rows: IntArray
    starts: IntArray

    @cached_property
    def least_forward_s(self) -> FloatArray:
        """The least forward seconds for each of `rows`."""
        return np.asarray(np.minimum.reduceat(self.forward_s, self.starts))

    @cached_property
    def least_backward_s(self) -> FloatArray:
        """The least backward seconds for each of `rows`."""
        return np.asarray(np.minimum.reduceat(self.backward_s, self.starts))

    def allowed(self, limits: TimeLimits, span: slice = EVERY) -> npt.NDArray[np.bool_]:
        """Return a mask of the options of `span` within the limits of both passes."""
        slack = 1.0 + TOLERANCE
        return (self.forward_s[span] <= limits.forward_s * slack) & (
            self.backward_s[span] <= limits.backward_s * slack
        )

    def capacity_by_row(self, limits: TimeLimits) -> FloatArray:
        """Return the largest capacity for each of `rows`; -1 where no option is allowed."""
        if not len(self.rows):
            return np.zeros(0)
        return np.maximum.reduceat(np.where(self.allowed(limits), self.capacity, -1.0), self.starts)

    def most_share(self, optimizer_s: float) -> float:
        """Return the largest share that a device updates in `optimizer_s`."""
        if self.optimizer_s == 0:
            return 1.0
        return min(1.0, optimizer_s * (1.0 + TOLERANCE) / self.optimizer_s)

    @property
    def update_speed(self) -> float:
        """Shares updated per second by a device; infinite if the update takes no time."""
        return 1.0 / self.optimizer_s if self.optimizer_s > 0 else float("inf")

    def pick(self, samples: int, share: float, limits: TimeLimits) -> int:
        """Return the allowed option of least work with `samples` samples and room for `share`.

        Ties go to the smaller micro-batch, then to the plainer mode. An option must exist.
        """
        row = int(np.searchsorted(self.rows, samples))
        end = self.starts[row + 1] if row + 1 < len(self.starts) else len(self.samples)
        span = slice(int(self.starts[row]), int(end))
        good = self.allowed(limits, span) & (self.capacity[span] >= share * (1.0 - TOLERANCE))
        return span.start + int(np.argmin(np.where(good, self.work_s[span], np.inf)))


@dataclass(frozen=True)
class PoolMember:
    """The devices of a class in a pool: each stores at most, or exactly (`equal`), `cap`."""

    options: ClassOptions
    devices: int
    cap: float
    equal: bool

    def room_by_row(self, limits: TimeLimits) -> FloatArray:
        """Return the largest share to store next to each row of samples; -1 if none is allowed."""
        capacity = self.options.capacity_by_row(limits)
        if self.equal:
            return np.where(capacity >= self.cap, self.cap, -1.0)
        return np.minimum(capacity, self.cap)

    def room_of(self, counts: npt.ArrayLike, limits: TimeLimits) -> FloatArray:
        """Return the largest share to store next to each of `counts` samples."""
        return self.room_by_row(limits)[np.searchsorted(self.options.rows, counts)]


@dataclass(frozen=True)
class PoolOptions:
    """A pool, standing for `alike` like pools."""

    members: tuple[PoolMember, ...]
    alike: int


def list_pool_options(
    setting: ShardingSetting, options: Mapping[str, ClassOptions]
) -> tuple[PoolOptions, ...]:
    """Return the pools of a setting with the options of each class."""
    return tuple(
        PoolOptions(
            tuple(
                PoolMember(
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


class Grid:
    """All numbers of samples from `least` to `most` (rows) in micro-batches of all `sizes`
    (columns), and the parts of a mode that do not depend on the setting."""

    def __init__(self, profile: Profile, least: int, most: int, sizes: IntArray) -> None:
        self.sizes = sizes
        self.micro_batch, self.samples = np.meshgrid(sizes, np.arange(least, most + 1))
        self.micro = MicroBatches.of(self.samples, self.micro_batch)
        # Of sizes taking all samples at once, only the first is a separate option.
        self.distinct = np.concatenate(([-1], sizes[:-1])) < self.samples
        self._profile = profile
        self._held: dict[tuple[int, Mode], Activations] = {}
        self._work: dict[tuple[str, Mode], FloatArray] = {}
        self._passes: dict[Hashable, tuple[FloatArray, FloatArray]] = {}

    def held(self, name: str, mode: Mode) -> Activations:
        """Return the activations on a device of class `name`, shared by classes of equal models."""
        model = self._profile.model_of(name)
        key = (id(model), mode)
        if key not in self._held:
            self._held[key] = Activations(model, self.micro, mode)
        return self._held[key]

    def work_s(self, name: str, mode: Mode) -> FloatArray:
        """Return seconds of all work of a device of class `name`."""
        if (name, mode) not in self._work:
            self._work[name, mode] = compute_work_seconds(self._profile, name, self.micro, mode)
        return self._work[name, mode]

    def pass_s(
        self, links: CollectiveSeconds, name: str, mode: Mode
    ) -> tuple[FloatArray, FloatArray]:
        """Return `compute_pass_seconds`, once for equally fast links: most settings of a search
        differ in memory only."""
        key = (name, mode, links.of_class(name).times)
        if key not in self._passes:
            self._passes[key] = compute_pass_seconds(self._profile, name, links, self.micro, mode)
        return self._passes[key]


class GridCache:
    """A cache of grids for the next settings."""

    def __init__(self, profile: Profile, batch: int) -> None:
        self._profile = profile
        self._batch = batch
        self._known: dict[tuple[int, int, bytes], Grid] = {}

    def of(self, least: int, most: int, sizes: IntArray) -> Grid:
        """Return a grid with at least all samples from `least` to `most`.

        Raises:
            InputError: the grid is too large to look through.
        """
        if (most - least) * len(sizes) > MOST_CELLS:
            raise InputError(
                f"'global_batch_size' is {self._batch}: so many samples of so small a model can be "
                "cut in too many ways to look through",
                code="batch-too-large-to-search",
                why=f"a device may do {least} to {most} of them, in micro-batches of {sizes[0]} to "
                f"{sizes[-1]}",
                fix="lower `global_batch_size`; samples may be longer instead (`sequence_length`)",
            )
        least -= least % ROWS_AT_ONCE
        most = min(self._batch, -(-most // ROWS_AT_ONCE) * ROWS_AT_ONCE)
        key = (least, most, sizes.tobytes())
        grid = self._known.pop(key, None) or Grid(self._profile, least, most, sizes)
        self._known[key] = grid  # the last of a dict is the one used last
        if len(self._known) > MOST_GRIDS:
            del self._known[next(iter(self._known))]
        return grid


@dataclass(frozen=True)
class _Table:
    """All options of one mode: samples by row, micro-batch sizes by column."""

    forward_s: FloatArray
    backward_s: FloatArray
    work_s: FloatArray
    capacity: FloatArray


@dataclass(frozen=True)
class OptionTable:
    """All options of a class: samples by row, micro-batch sizes of all modes by column.

    Attributes:
        valid: a mask of the options with room, in time, and unlike all others.
    """

    name: str
    optimizer_s: float
    modes: tuple[Mode, ...]
    grid: Grid
    forward_s: FloatArray
    backward_s: FloatArray
    work_s: FloatArray
    capacity: FloatArray
    valid: npt.NDArray[np.bool_]

    def list_options(self, *, thinned: bool) -> ClassOptions:
        """Return the options, of many without those beaten if `thinned`."""
        keep, columns = self.valid, (1, len(self.modes))
        if thinned and keep.size > MIN_OPTIONS_TO_THIN:
            times = (self.forward_s, self.backward_s, self.work_s)
            keep = keep & ~_dominated(keep, self.capacity, *times)
        samples = np.tile(self.grid.samples, columns)[keep]
        rows, starts = np.unique(samples, return_index=True)
        return ClassOptions(
            name=self.name,
            optimizer_s=self.optimizer_s,
            modes=self.modes,
            samples=samples,
            micro_batch=np.tile(self.grid.micro.size, columns)[keep],
            mode=np.nonzero(keep)[1] // len(self.grid.sizes),
            forward_s=self.forward_s[keep],
            backward_s=self.backward_s[keep],
            work_s=self.work_s[keep],
            capacity=self.capacity[keep],
            rows=rows,
            starts=starts,
        )

    @property
    def most_samples(self) -> int:
        """The most samples of an option; -1 if there is none."""
        rows = np.flatnonzero(self.valid.any(axis=1))
        return int(self.grid.samples[rows[-1], 0]) if len(rows) else -1


def tabulate(setting: ShardingSetting, name: str, grid: Grid, within_s: float) -> OptionTable:
    """Tabulate the options of class `name` on a grid with both passes in at most `within_s`."""
    modes = setting.modes[name]
    tables = [_table(setting, name, grid, mode) for mode in modes]
    forward = np.concatenate([t.forward_s for t in tables], axis=1)
    backward = np.concatenate([t.backward_s for t in tables], axis=1)
    capacity = np.concatenate([t.capacity for t in tables], axis=1)
    distinct = np.tile(grid.distinct, (1, len(modes)))
    return OptionTable(
        name,
        0.0 if setting.zero_stage == 0 else setting.update_s(name),
        modes,
        grid,
        forward,
        backward,
        np.concatenate([t.work_s for t in tables], axis=1),
        capacity,
        valid=(capacity >= 0) & (forward + backward <= within_s) & distinct,
    )


def _table(setting: ShardingSetting, name: str, grid: Grid, mode: Mode) -> _Table:
    held = grid.held(name, mode)
    forward, backward = grid.pass_s(setting.links, name, mode)
    if not needs_sync_between_passes(setting.zero_stage):
        forward, backward = forward + backward, np.zeros_like(backward)
    return _Table(forward, backward, grid.work_s(name, mode), setting.room(name, held))


@dataclass(frozen=True)
class _ClassTimeBound:
    """Bounds on the time of a device of one class, for any links and share.

    `per_sample_s` is the least time of a sample in any micro-batch of up to `largest` samples;
    larger micro-batches have no room.
    """

    largest: int
    per_sample_s: float


@dataclass(frozen=True)
class _LeastPassSeconds:
    """The least seconds by number of samples, up to `FEW_ROWS`: of each pass alone and of both, if
    there is room without storing state; else infinite."""

    forward_s: FloatArray
    backward_s: FloatArray
    both_s: FloatArray

    def most_samples(self, within_s: float, moved_s: tuple[float, float]) -> int | None:
        """Return an upper bound of a device's samples in `within_s`, if passes take at least
        `moved_s`; -1 if the device cannot take part, None if all tabulated numbers are possible."""
        forward, backward = moved_s
        least = np.maximum(self.forward_s + backward, forward + self.backward_s)
        least = np.maximum(np.maximum(self.both_s, least), forward + backward)
        done = np.flatnonzero(least <= within_s * (1.0 + TOLERANCE))
        most = int(done[-1]) if len(done) else -1
        return most if most + 1 < len(least) else None


class TimeBounds:
    """Time bounds of all settings and the grids they share, cached for all settings of a search,
    and for searches of the same classes, batch and space."""

    def __init__(self, profile: Profile, batch: int) -> None:
        self.batch = self._most = batch
        self.grids = GridCache(profile, batch)
        self._updates: dict[Hashable, float] = {}
        # All that follows is shared with smaller batches: the bounds of large ones hold for them.
        self._few = self.grids
        self._free = make_free_collectives(build_buckets(profile.model, ONE_UNIT_PER_BUCKET))
        self._stateless: dict[ZeroStage, MemoryModel] = {}
        self._alone: dict[tuple[int, int, Mode], tuple[IntArray, Activations]] = {}
        self._paces: dict[tuple[str, ZeroStage, tuple[Place, ...]], _ClassTimeBound] = {}
        self._least: dict[tuple[str, ZeroStage, tuple[Place, ...]], _LeastPassSeconds] = {}
        # By class, mode and largest micro-batch.
        self._rates: dict[tuple[str, Mode, int], float] = {}
        self._passes: dict[tuple[str, Mode, int], FloatArray] = {}
        self._of_leaders: dict[Hashable, TimeBounds] = {}

    def of_part(self, profile: Profile, batch: int) -> TimeBounds:
        """Return the bounds of a smaller batch, such as a wave, whose updates may take less."""
        part = copy(self)
        part.batch, part.grids, part._updates = batch, GridCache(profile, batch), {}
        return part

    def of_leaders(self, profile: Profile) -> TimeBounds:
        """Return the bounds of the leaders of tensor-parallel groups, shared between batches."""
        names = [one.name for one in profile.cluster.classes]
        units = [ByIdentity(profile.of_class(name).units) for name in names]
        key = tuple((n, u, compute_free_bytes(profile, n)) for n, u in zip(names, units))
        if key not in self._of_leaders:
            self._of_leaders[key] = TimeBounds(profile, self._most)
        return self._of_leaders[key].of_part(profile, self.batch)

    def update_s(self, setting: ShardingSetting, name: str) -> float:
        """Return `ShardingSetting.update_s`, computed once for settings in which it is the same."""
        key = (
            name,
            setting.zero_stage,
            setting.places(name),
            setting.parameters_on,
            setting.links.communication_dtype,
        )
        if key not in self._updates:
            self._updates[key] = setting.update_s(name)
        return self._updates[key]

    def seconds_per_sample(self, setting: ShardingSetting, name: str) -> float:
        """Return the least seconds per sample on a device of class `name`, in any micro-batch."""
        return self._pace(setting, name).per_sample_s

    def largest_micro_batch(self, setting: ShardingSetting, name: str) -> int:
        """Return an upper bound of the micro-batch on a device of class `name`, by room and by
        measured sizes; at least 1."""
        return self._pace(setting, name).largest

    def most_samples(self, setting: ShardingSetting, name: str, within_s: float) -> int:
        """Return an upper bound of samples in `within_s` on class `name`; -1 if collectives alone
        take longer."""
        per_sample_s = self.seconds_per_sample(setting, name)
        if sum(setting.links.idle_pass_s) > within_s * (1.0 + TOLERANCE):
            return -1
        if per_sample_s * self.batch <= within_s:
            return self.batch
        return int(within_s / per_sample_s * (1.0 + TOLERANCE))

    def most_samples_alone(self, setting: ShardingSetting, name: str, within_s: float) -> int:
        """Return an upper bound of samples in `within_s` on class `name`, over any links."""
        most = self._least_of(setting, name).most_samples(within_s, (0.0, 0.0))
        return self.batch if most is None else most

    def can_compute_batch(self, setting: ShardingSetting, within_s: float) -> bool:
        """Return False if all devices together cannot do the batch in `within_s`."""
        most = {name: self.most_samples(setting, name, within_s) for name in setting.classes}
        if min(most.values()) < 0:
            return False
        reached = sum(len(devices) * most[name] for name, devices in setting.classes.items())
        if reached < self.batch or within_s == float("inf"):
            return reached >= self.batch
        for name, devices in setting.classes.items():
            fewer = self._least_of(setting, name).most_samples(within_s, setting.links.idle_pass_s)
            if fewer is not None:
                reached -= len(devices) * max(0, most[name] - fewer)
            if reached < self.batch or fewer == -1:
                return False
        return True

    def samples_per_s(self, setting: ShardingSetting) -> float:
        """Return the most samples a second of all devices."""
        of_class = setting.classes.items()
        return sum(len(devices) * self.speed(setting, name) for name, devices in of_class)

    def speed(self, setting: ShardingSetting, name: str) -> float:
        """Return the most samples a second of a device of class `name`, in any micro-batch."""
        per_sample_s = self.seconds_per_sample(setting, name)
        return 1.0 / per_sample_s if per_sample_s > 0 else float("inf")

    def _pace(self, setting: ShardingSetting, name: str) -> _ClassTimeBound:
        key = (name, setting.zero_stage, setting.places(name))
        if key not in self._paces:
            limits = {mode: self._largest(setting, name, mode) for mode in setting.modes[name]}
            per_sample = (self._per_sample_s(setting, name, m, n) for m, n in limits.items())
            self._paces[key] = _ClassTimeBound(max(limits.values()), min(per_sample))
        return self._paces[key]

    def _per_sample_s(self, setting: ShardingSetting, name: str, mode: Mode, largest: int) -> float:
        key = (name, _remove_offload(mode), largest)
        if key not in self._rates:
            sizes = np.asarray(list_corner_sizes(setting.profile, name, largest))
            whole = MicroBatches.of(sizes, sizes)
            passes = compute_pass_seconds(setting.profile, name, self._free, whole, key[1])
            self._rates[key] = float(np.min(np.add(*passes) / sizes))
        return self._rates[key]

    def _least_of(self, setting: ShardingSetting, name: str) -> _LeastPassSeconds:
        key = (name, setting.zero_stage, setting.places(name))
        if key not in self._least:
            self._least[key] = self._measure(setting, name)
        return self._least[key]

    def _measure(self, setting: ShardingSetting, name: str) -> _LeastPassSeconds:
        rows, largest = min(self._most, FEW_ROWS), self.largest_micro_batch(setting, name)
        grid = self._few.of(0, rows, np.arange(1, min(rows, largest) + 1))
        least = []
        for mode in setting.modes[name]:
            key = (name, _remove_offload(mode), largest)
            if key not in self._passes:
                passes = compute_pass_seconds(setting.profile, name, self._free, grid.micro, key[1])
                self._passes[key] = np.stack([*passes, np.add(*passes)])
            fits = self._fits(setting, name, grid.held(name, mode))
            least.append(np.where(fits, self._passes[key], np.inf).min(axis=2))
        return _LeastPassSeconds(*np.min(least, axis=0)[:, : rows + 1])

    def _largest(self, setting: ShardingSetting, name: str, mode: Mode) -> int:
        """Return an upper bound of the micro-batch by room in a mode, however the rest is run: a
        micro-batch run alone takes the least memory, and more with more samples. If sizes are few,
        return the limit."""
        limit = setting.largest_micro_batch(name, self._most)
        if limit <= FEW_SIZES:
            return limit
        model = setting.profile.model_of(name)
        key = (limit, id(model), mode)
        if key not in self._alone:
            sizes = np.unique(np.geomspace(1, limit, FEW_SIZES).astype(np.int64))
            held = Activations(model, MicroBatches.of(sizes, sizes), mode)
            self._alone[key] = sizes, held
        sizes, held = self._alone[key]
        fits = np.flatnonzero(self._fits(setting, name, held))
        above = int(fits[-1]) + 1 if len(fits) else 0
        return max(1, int(sizes[above]) - 1) if above < len(sizes) else limit

    def _fits(
        self, setting: ShardingSetting, name: str, held: Activations
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of activations with room on a device of class `name` storing no state."""
        zero_stage = setting.zero_stage
        if zero_stage not in self._stateless:
            self._stateless[zero_stage] = MemoryModel(setting.profile, self._free, 1, zero_stage)
        stateless, free = self._stateless[zero_stage], compute_free_bytes(setting.profile, name)
        places = setting.places(name)
        least = (stateless.demands(held, state_on=place).fixed_bytes for place in places)
        return np.asarray(reduce(np.minimum, least) <= free)


def _remove_offload(mode: Mode) -> Mode:
    """Return a mode no slower than `mode`, as copies to the host only add time. The order stays,
    since it decides where the forward pass ends."""
    return mode.model_copy(update={"boundary": "device"})


def list_corner_sizes(profile: Profile, name: str, limit: int) -> list[int]:
    """Return sizes up to `limit`, including the size of least time per sample on class `name`.

    Between two points of a curve, the time of a sample rises or falls all the way; beyond the last
    point, it is constant. So the whole sizes next to the points are enough, and the limit.
    """
    found, device = {1}, profile.of_class(name)
    of_units = (curve for unit in device.units.values() for _, curve in unit)
    for curve in (device.chunked_cross_entropy, *of_units):
        if curve is not None:
            found |= {whole for size in curve.sizes for whole in (floor(size), ceil(size))}
    found.add(min(limit, max(found)))
    return sorted(size for size in found if 1 <= size <= limit)


def _dominated(
    valid: npt.NDArray[np.bool_],
    capacity: FloatArray,
    forward: FloatArray,
    backward: FloatArray,
    work: FloatArray,
) -> npt.NDArray[np.bool_]:
    """Return a mask of options beaten or equaled in everything by an option of as many samples.

    Each row is walked from the largest capacity down. An option is compared with the three options
    before it of least forward, least backward and least work: some dominated options are
    overlooked, which costs only time, but none is dropped wrongly.
    """
    times = [np.where(valid, t, np.inf) for t in (forward, backward, work)]
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
    """Return, for each entry of a row, the place of the least key before; -1 for the first."""
    least = np.minimum.accumulate(key, axis=1)
    fresh = np.ones(key.shape, dtype=bool)
    fresh[:, 1:] = key[:, 1:] < least[:, :-1]
    places = np.where(fresh, np.arange(key.shape[1]), -1)
    latest = np.maximum.accumulate(places, axis=1)
    before = np.full(key.shape, -1)
    before[:, 1:] = latest[:, :-1]
    return before
