"""Estimated step times of plans of several stages: of a row of groups, at all micro-batch sizes.

An estimate knows the times of stages, messages and sums, and the room, but no order. A step takes
as long as the busiest stage is busy, plus the time the last micro-batch needs for the other stages
(Narayanan et al. 2021: for p equal stages and m micro-batches, m + p - 1 parts), if the busiest
stage is idle meanwhile. A dynamic program divides the model to minimize the step, and decides the
manner of each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpumix.cost.memory_layout.curves import FloatArray, IntArray, interpolate_bytes
from gpumix.cost.network.buckets import GRADIENT_BYTES
from gpumix.cost.peak_memory import compute_free_bytes, get_element_bytes
from gpumix.planner.pipeline_parallel.call_times import CallTimesCache
from gpumix.planner.pipeline_parallel.candidate import UncutCandidate, get_stages_per_group
from gpumix.planner.pipeline_parallel.device_order import Row, get_device_place
from gpumix.planner.pipeline_parallel.micro_batch_counts import CutCandidate
from gpumix.planner.pipeline_parallel.stage_modes import (
    NO_TENSOR_PARALLEL,
    GroupKind,
    StageMode,
    StageModes,
    count_workers_by_class,
    get_group_kind,
)
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.plan import Schedule, ZeroStage
from gpumix.schema.plan.stage import DTYPE_BYTES, Mode
from gpumix.schema.profile.profile import ModelProfile, Profile

MOST_EDGES = 65
MOST_PAIRS = 8  # of devices of two groups, to time messages between
WAVES_A_STAGE = (1, 2, 4, 8)  # numbers of waves, as multiples of the stages
TINY_S = 1e-12
# Part of the way through the other stages for which a worker waits, if computing weight gradients
# meanwhile: forward and backward, less weight gradients; each about as long (Qi et al. 2023).
ZERO_BUBBLE_WAIT_FRACTION = 1 / 3

Values = npt.NDArray[np.floating[Any]]
"""Seconds or bytes, in single precision."""


class EstimatedStage(NamedTuple):
    """A stage to be estimated: the group, the schedule, and the place among the stages.

    Attributes:
        waiting: micro-batches waiting at the group in addition to running ones, of which a worker
            has its part; or whole waves.
        waves: in which all workers of the stage compute together; 0: each computes alone.
    """

    kind: GroupKind
    schedule: Schedule
    last: bool
    waiting: float
    waves: int = 0


@dataclass(frozen=True)
class _GroupTimes:
    """Times of a group for the calls of every range in each manner, as [manners, sizes, ranges]
    arrays, and the bytes of micro-batches by class."""

    manners: tuple[StageMode, ...]
    workers: tuple[tuple[str, FloatArray], ...]  # by class, the number in each manner
    busy_s: Values
    one_s: Values
    held: Mapping[str, Values]


@dataclass(frozen=True)
class _StageEstimate:
    """A group with the calls of any range, as [sizes, ranges] arrays.

    Attributes:
        busy_s: with the whole batch; infinite without room.
        one_s: with one micro-batch, or one wave.
        manner: the number of the best manner.
    """

    busy_s: Values
    one_s: Values
    manner: npt.NDArray[np.int8]


@dataclass(frozen=True)
class _FirstStages:
    """The best division of the calls before each edge among the first stages of a row.

    Attributes:
        busy_s: of the busiest stage, as [sizes, edge where the stages end]; infinite without room.
        others_s: a micro-batch through all these stages, likewise.
        begins: by stage, the edge where the stage begins, likewise.
    """

    busy_s: Values
    others_s: Values
    stages: tuple[_StageEstimate, ...]
    begins: tuple[npt.NDArray[np.int8], ...]


@dataclass(frozen=True)
class StageDivision:
    """The best division of a model among the stages of a row.

    Attributes:
        seconds: of the step, as [sizes]; infinite without room or a manner for the schedule.
        ideal_s: as [sizes], of the best schedule, without late gradients.
        waits: whether too few micro-batches are under way to avoid waiting.
        begins: by stage, the edge where the stage begins, as [sizes, edge where the stage ends].
    """

    seconds: FloatArray
    ideal_s: FloatArray
    waits: bool
    stages: tuple[_StageEstimate, ...]
    begins: tuple[npt.NDArray[np.int8], ...]

    @property
    def fits(self) -> bool:
        """True if micro-batches of some size have room."""
        return bool(np.isfinite(self.seconds).any())


class PipelineEstimates:
    """Estimates of ways to train `batch` samples a step in micro-batches of `sizes`, with at most
    `most_edges` places to cut the model, evenly chosen; 128 at most."""

    def __init__(
        self,
        pace_of: CallTimesCache,
        manners: StageModes,
        batch: int,
        sizes: Sequence[int],
        most_edges: int = MOST_EDGES,
    ) -> None:
        self._pace_of = pace_of
        self._batch = batch
        self.sent_s = pace_of.sent_s
        self.manners = manners
        self.profile = pace_of.profiles[NO_TENSOR_PARALLEL]
        self.sizes = tuple(sizes)
        self.counts = -(-batch // np.array(sizes))
        model = self.profile.model
        edges = np.array([0, *model.cuts, len(model.calls)])
        chosen = np.linspace(0, len(edges) - 1, min(len(edges), most_edges))
        self.edges = edges[np.round(chosen).astype(np.int64)]
        self._begin, self._end, self.range_of = self._ranges()
        self.stage = lru_cache(maxsize=None)(self._stage)
        self.divide = lru_cache(maxsize=None)(self._divide)
        self._computing = lru_cache(maxsize=None)(self._computing_of)
        self._taken_s = lru_cache(maxsize=None)(self._compute_micro_batch_s)
        self._held_bytes = lru_cache(maxsize=None)(self._held_bytes_of)
        self._elements = lru_cache(maxsize=None)(self._elements_of)

    @property
    def ranges(self) -> tuple[IntArray, IntArray, IntArray]:
        """The distinct ranges of calls: begins, ends, and the number of each range by last and
        first edge."""
        return self._begin, self._end, self.range_of

    def with_sizes(self, sizes: Sequence[int]) -> PipelineEstimates:
        """Return estimates for other sizes of a micro-batch."""
        return PipelineEstimates(self._pace_of, self.manners, self._batch, sizes)

    def of(self, row: Row) -> RowEstimates:
        """Return the estimates of a row."""
        return RowEstimates(self, row)

    def _ranges(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return the distinct ranges of calls between two edges: begins, ends, and the number of
        each range by last and first edge. Ranges of equal calls share a number; the last number is
        for empty ranges."""
        model = self.profile.model
        kinds = list(dict.fromkeys(model.kind_of_call))
        called = np.array([[kind == one for one in kinds] for kind in model.kind_of_call])
        before = np.concatenate([np.zeros((1, len(kinds)), np.int64), np.cumsum(called, axis=0)])
        end, begin = (edge.ravel() for edge in np.meshgrid(self.edges, self.edges, indexing="ij"))
        there = begin < end
        end, begin = end[there], begin[there]
        columns = [*(before[end] - before[begin]).T, begin == 0, end == len(model.calls)]
        columns += [room.elements(begin, end) for room in self._pace_of.rooms.values()]
        _, first, number = np.unique(
            np.stack(columns), axis=1, return_index=True, return_inverse=True
        )
        shape = (len(self.edges), len(self.edges))
        range_of = np.full(shape, len(first), np.int64)
        range_of[there.reshape(shape)] = number.ravel()
        return begin[first], end[first], range_of

    @cached_property
    def message_bytes(self) -> list[float]:
        """Bytes returned by the unit returning most, by micro-batch size."""
        model = self.profile.model
        curves = [model.kind(name).outputs.values() for name in set(model.kind_of_call)]
        return [
            max(
                sum(float(interpolate_bytes(curve, size)) for curve in of_kind)
                for of_kind in curves
            )
            for size in self.sizes
        ]

    # -- the first stages of a row -------------------------------------------------------------

    def _divide(self, places: tuple[EstimatedStage, ...], zero_stage: ZeroStage) -> _FirstStages:
        """Divide the calls before every edge among stages; rows that begin alike share these. The
        first stage begins at the first edge, the last stage ends at the last."""
        if not places:
            begin_s = np.zeros((len(self.sizes), 1), np.float32)
            return _FirstStages(begin_s, begin_s, (), ())
        before = self.divide(places[:-1], zero_stage)
        if not np.isfinite(before.busy_s).any():
            return before
        stage, last = self.stage(places[-1], zero_stage), places[-1].last
        edges = before.busy_s.shape[1]
        ranges = self.range_of[-1 if last else 0 :, :edges]
        most = np.take(stage.busy_s, ranges, axis=1)
        np.maximum(before.busy_s[:, None, :], most, out=most)
        total = np.take(stage.one_s, ranges, axis=1)
        total += before.others_s[:, None, :]
        begin = (most + total).argmin(axis=-1)
        each_size, each_end = np.ogrid[: len(self.sizes), : len(ranges)]
        chosen = each_size, each_end, begin
        return _FirstStages(
            most[chosen],
            total[chosen],
            (*before.stages, stage),
            (*before.begins, begin.astype(np.int8)),
        )

    # -- one stage -----------------------------------------------------------------------------

    def _stage(self, place: EstimatedStage, zero_stage: ZeroStage) -> _StageEstimate:
        """Return the best manner for each range. From ZeRO stage 2 on, each wave sums gradients and
        gathers parameters while computing; without waves, the whole step sums gradients."""
        computing = self._computing(place)
        shape = (len(self.sizes), len(self._begin) + 1)  # with the empty range
        busy_s, one_s = np.full((2, *shape), np.inf, np.float32)
        manner = np.zeros(shape, np.int8)
        if computing.manners:
            busy, one = computing.busy_s, computing.one_s
            moved_s = self._compute_collective_s(place, computing.manners, zero_stage)
            if zero_stage < 2:
                busy = busy + moved_s
            elif place.waves:
                one = np.maximum(busy / place.waves, moved_s)
                busy = one * place.waves + moved_s
            else:
                busy = np.maximum(busy, self._compute_collective_s(place, computing.manners, 2))
            busy = np.where(self._fits(computing, zero_stage, place), busy, np.inf)
            best = busy.argmin(axis=0)
            busy_s[:, :-1] = np.take_along_axis(busy, best[None], axis=0)[0]
            one_s[:, :-1] = np.take_along_axis(one, best[None], axis=0)[0]
            manner[:, :-1] = best
        return _StageEstimate(busy_s, one_s, manner)

    def _computing_of(self, place: EstimatedStage) -> _GroupTimes:
        kind, rounds = place.kind, get_stages_per_group(place.schedule)
        manners = self.manners.of(kind, place.schedule, last=place.last)
        if not manners:
            nothing = np.zeros((0, 0, 0), np.float32)
            return _GroupTimes((), (), nothing, nothing, {})
        of_manners = [dict(count_workers_by_class(kind, manner.tp.degree)) for manner in manners]
        workers = tuple((name, _stack([of[name] for of in of_manners])) for name in of_manners[0])
        taken = {name: self._taken_s(name, manners) for name, _ in workers}
        speed = sum((count / taken[name] for name, count in workers), np.zeros(1, np.float32))
        counts = self.counts.astype(np.float32)[:, None]
        held = {}
        for name, _ in workers:
            part = 1 / (taken[name] * speed)  # of the micro-batches
            if place.waves:
                here = np.ceil(counts * part / place.waves) * min(1 + place.waiting, place.waves)
            else:
                here = np.ceil(np.minimum(1 + place.waiting * part, counts * part))
            each, working = self._held_bytes(name, manners, place.last)
            profiles = [self._pace_of.profiles[manner.tp] for manner in manners]
            buffers = _stack([profile.model.root.buffer_bytes for profile in profiles])
            held[name] = here * each + working + buffers / rounds
        largest = _stack([self.manners.largest(kind, manner.tp) for manner in manners])
        measured = np.array(self.sizes)[:, None] <= largest
        # Micro-batches are dealt undivided, in each wave or in the step.
        batches = counts / max(1, place.waves)
        whole_s = batches / speed
        for name, _ in workers:
            whole_s = np.maximum(whole_s, np.rint(batches / (taken[name] * speed)) * taken[name])
        busy_s = np.where(measured, whole_s * max(1, place.waves), np.inf).astype(np.float32)
        one_s = sum((count for _, count in workers), np.zeros(1, np.float32)) / speed
        return _GroupTimes(manners, workers, busy_s, one_s, held)

    def _compute_micro_batch_s(self, name: str, manners: tuple[StageMode, ...]) -> Values:
        """Return seconds of one micro-batch of each range, on one device or tensor-parallel
        group of a class."""
        paces = (self._pace_of(name, one.tp, one.mode, self.sizes) for one in manners)
        taken = np.stack([pace.stage_s(self._begin, self._end) for pace in paces])
        return np.maximum(taken, TINY_S).astype(np.float32)

    def _held_bytes_of(
        self, name: str, manners: tuple[StageMode, ...], last: bool
    ) -> tuple[Values, Values]:
        """Return bytes of each waiting micro-batch, by range, and of the running micro-batch."""
        each, working = [], []
        for manner in manners:
            model = self._pace_of.profiles[manner.tp].model_of(name)
            before, computed = compute_activation_bytes(model, manner.mode, self.sizes, last=last)
            held = before[:, self._end] - before[:, self._begin]
            each.append(held + np.array(self.message_bytes)[:, None])
            working.append(computed[:, None])
        return np.stack(each).astype(np.float32), np.stack(working).astype(np.float32)

    def _elements_of(self, manners: tuple[StageMode, ...]) -> FloatArray:
        """Return the trained elements of each range, as [manners, 1, ranges]."""
        rooms = (self._pace_of.rooms[manner.tp] for manner in manners)
        return np.stack([room.elements(self._begin, self._end) for room in rooms])[:, None]

    def _fits(
        self, computing: _GroupTimes, zero_stage: ZeroStage, place: EstimatedStage
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of room: each worker for the undivided state, and all workers together for
        the rest. Several stages of a worker divide the memory equally."""
        elements, rounds = self._elements(computing.manners), get_stages_per_group(place.schedule)
        profiles = [self._pace_of.profiles[manner.tp] for manner in computing.manners]
        least: FloatArray = np.full(1, np.inf)
        room = needed = np.zeros(1)
        for name, count in computing.workers:
            each = [get_element_bytes(profile, name, zero_stage) for profile in profiles]
            whole, owned = (_stack(part) for part in zip(*each))
            free = [compute_free_bytes(profile, name) / rounds for profile in profiles]
            filled = [_buffer_bytes(profile, name, zero_stage) for profile in profiles]
            left = _stack(free) - _stack(filled) - elements * whole - computing.held[name]
            least = np.minimum(least, left)
            room = room + count * left
            needed = np.maximum(needed, elements * owned)
        return np.asarray((least >= 0) & (room >= needed))

    def _compute_collective_s(
        self, place: EstimatedStage, manners: tuple[StageMode, ...], zero_stage: ZeroStage
    ) -> FloatArray:
        """Return seconds of gradient sums and parameter gathers between a group's workers: in a
        step, from ZeRO stage 2 on in a wave."""
        rates = [
            self._pace_of.compute_reduce_s_per_byte(place.kind, manner.tp) for manner in manners
        ]
        reduced = _stack(rates) * GRADIENT_BYTES
        gathered = reduced / 2  # half as many bytes, or nothing to add up
        passes = 3 if place.schedule == "zero-bubble" else 2
        times = {
            0: 2 * reduced,
            1: reduced + gathered,
            2: reduced,
            3: reduced + passes * gathered,
        }
        return np.asarray(self._elements(manners) * times[zero_stage]).astype(np.float32)


def _buffer_bytes(profile: Profile, name: str, zero_stage: ZeroStage) -> float:
    """Return bytes of collective buffers on a device of a class: two units' gradients, and at stage
    3 their parameters."""
    if zero_stage < 2:
        return 0.0
    largest = max(kind.trainable for kind in profile.model.kinds)
    width = DTYPE_BYTES[profile.of_class(name).compute_dtype] if zero_stage == 3 else 0
    return 2.0 * largest * (GRADIENT_BYTES + width)


def _stack(of_manners: Sequence[float]) -> FloatArray:
    """Stack a number of each manner, as [manners, 1, 1]."""
    return np.array(of_manners, float)[:, None, None]


class RowEstimates:
    """Estimates of one row of groups."""

    def __init__(self, estimates: PipelineEstimates, row: Row) -> None:
        self._estimates = estimates
        self.row = row
        self._kinds = tuple(map(get_group_kind, row))
        self.divided = lru_cache(maxsize=None)(self._divided)

    def waves(self, zero_stage: ZeroStage) -> list[int]:
        """Return the numbers of waves to try; 0 without waves."""
        if zero_stage < 2:
            return [0]
        stages, most = len(self.row), int(self._most_waves.max())
        return sorted({min(most, times * stages) for times in WAVES_A_STAGE})

    @cached_property
    def _most_waves(self) -> IntArray:
        """The most waves by size: each group has a worker with a micro-batch in every wave."""
        return np.asarray(-(-self._estimates.counts // max(map(len, self.row))))

    def _divided(self, zero_stage: ZeroStage, schedule: Schedule, waves: int) -> StageDivision:
        """Divide the model among the row's stages; see `PipelineEstimates.stage`."""
        estimates, rounds = self._estimates, get_stages_per_group(schedule)
        places = tuple(
            EstimatedStage(
                kind,
                schedule,
                number == len(self._kinds) * rounds - 1,
                self._waiting(number % len(self._kinds), schedule, waves),
                waves,
            )
            for number, kind in enumerate(self._kinds * rounds)
        )
        divided = estimates.divide(places, zero_stage)
        busy, others, stages = divided.busy_s, divided.others_s, divided.stages
        if not np.isfinite(busy).any():
            nothing = np.full(len(estimates.sizes), np.inf)
            return StageDivision(nothing, nothing, False, (), ())
        through = np.where(np.isfinite(busy[:, -1]), others[:, -1], 0.0)
        sent_s, linked_s, queued_s = self._sent_s
        counts, first = estimates.counts, 1 if waves else len(self.row[0])
        batches = np.minimum(counts, waves) if waves else counts
        # Micro-batches under way at once return only after passing all stages.
        under_way = first + self._waiting(0, schedule, waves)
        returned_s = batches * (through + 2 * rounds * queued_s) / under_way
        busiest = np.maximum(busy[:, -1], linked_s * counts) * rounds
        fixed_s = estimates.profile.step_overhead_s + 2 * rounds * sent_s
        through = through * (1 - 1 / len(stages))
        least = ZERO_BUBBLE_WAIT_FRACTION * through
        if waves:
            busiest = np.where(waves <= self._most_waves, busiest, np.inf)
        seconds = np.maximum(busiest, returned_s) + fixed_s
        seconds += least if schedule == "zero-bubble" else through
        waits = bool((returned_s > busiest).any())
        return StageDivision(seconds, busiest + fixed_s + least, waits, stages, divided.begins)

    def candidate(
        self, zero_stage: ZeroStage, schedule: Schedule, waves: int, number: int
    ) -> CutCandidate | None:
        """Return the candidate of size `number`, or None."""
        estimates, found = self._estimates, self.divided(zero_stage, schedule, waves)
        if not np.isfinite(found.seconds[number]):
            return None
        ends, manners, at = [], [], -1
        for place in reversed(range(len(found.stages))):
            begin = int(found.begins[place][number, at])
            kind, last = self._kinds[place % len(self._kinds)], place == len(found.stages) - 1
            every, of_range = estimates.manners.of(kind, schedule, last=last), estimates.range_of
            manners.append(every[found.stages[place].manner[number, of_range[at, begin]]])
            ends.append(int(estimates.edges[at]))
            at = begin
        degrees = [manner.tp for manner in reversed(manners)]
        if degrees != degrees[: len(self.row)] * get_stages_per_group(schedule):
            return None  # a group's stages have the same tensor parallel degree
        way = UncutCandidate(self.row, tuple(reversed(manners)), schedule, estimates.sizes[number])
        return CutCandidate(way, zero_stage, tuple(reversed(ends)), waves=max(1, waves))

    def _waiting(self, place: int, schedule: Schedule, waves: int) -> float:
        """Return the micro-batches waiting at a group in addition to the running ones, of which a
        worker has a part; or the waves (`MicroBatchSchedule.in_flight`)."""
        if schedule == "gpipe":
            return float("inf")
        groups = len(self.row)
        if schedule == "zero-bubble":
            place = 0  # weight gradients may be deferred equally everywhere
        if schedule == "interleaved":
            rounds = get_stages_per_group(schedule)
            stages = 2 * (groups - place - 1) + (rounds - 1) * groups
            return (1 if waves else len(self.row[place])) * stages / rounds
        after = self.row[place + 1 :]
        later = len(after) if waves else sum(map(len, after))
        return 2.0 * later if schedule == "eager-1f1b" else float(later)

    @cached_property
    def _sent_s(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds of a micro-batch's messages from group to group, in one direction: of all, over
        the busiest link between hosts, and of all if all workers' messages on a link queue."""
        sizes = self._estimates.message_bytes
        total, busiest, queued = (np.zeros(len(sizes)) for _ in range(3))
        for one, other in pairwise(self.row):
            here, there = ({get_device_place(d): d for d in group} for group in (one, other))
            pairs = _choose_pairs(list(here.values()), list(there.values()))
            links = {frozenset((a.host, b.host)) for a, b in pairs}
            across = all(len(hosts) == 2 for hosts in links)
            ahead = max(1.0, (max(len(one), len(other)) / len(links) + 1) / 2) if across else 1.0
            mean = np.mean([self._estimates.sent_s(a, b, tuple(sizes)) for a, b in pairs], axis=0)
            total += mean
            queued += mean * ahead
            if across:
                busiest = np.maximum(busiest, mean / len(links))
        return total, busiest, queued


def _choose_pairs(here: Sequence[Device], there: Sequence[Device]) -> list[tuple[Device, Device]]:
    """Return some pairs of devices, evenly chosen of all."""
    every = len(here) * len(there)
    chosen = range(0, every, -(-every // MOST_PAIRS))
    return [(here[n // len(there)], there[n % len(there)]) for n in chosen]


def compute_activation_bytes(
    model: ModelProfile, mode: Mode, sizes: Sequence[int], *, last: bool, least: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Return bytes held by micro-batches on a device: of each waiting for its backward, by all
    calls before each, as [sizes, calls + 1]; and of the running micro-batch by size, in the `last`
    stage with head and loss, for the largest kind of unit or the `least`."""
    kinds = {name: model.kind(name) for name in set(model.kind_of_call)}
    left, needed = {}, []
    for name, kind in kinds.items():
        kept, backward = kind.kept, kind.backward
        if not mode.recompute and kind.saved and kind.saved_backward:
            kept, backward = kind.saved, kind.saved_backward
        left[name] = interpolate_bytes(kept, sizes)
        gradient = interpolate_bytes(kind.gradient, sizes)
        needed.append(interpolate_bytes(backward, sizes) + gradient)
    working: FloatArray = np.min(needed, axis=0) if least else np.max(needed, axis=0)
    head = model.root.head if mode.head == "whole" else model.root.chunked_cross_entropy
    if last and head is not None:
        working = np.maximum(working, interpolate_bytes(head, sizes))
    rows = [np.zeros(len(sizes)), *(left[name] for name in model.kind_of_call)]
    return np.cumsum(rows, axis=0).T, working
