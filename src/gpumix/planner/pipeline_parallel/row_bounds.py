"""Proven lower bounds of the step of rows of groups, wherever the model is cut, by any schedule.

A group computes at least its part of the batch: whole micro-batches, on as many workers as have
room for one beside their part of the state. From ZeRO stage 2 on all workers of a group wait for
one another, and sum gradients, in every wave; with fewer waves more micro-batches lie in memory at
once. A dynamic program over the cuts finds the division with the least busy group. Waiting for
other stages is not counted: with two stages on each device (interleaved) there may be next to none.

Plans that differ in the micro-batch size, the ZeRO stage and the number of waves are bounded apart,
waves in ranges: the range with the least bound is halved, until it is a single number.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpumix.cost.memory_layout.curves import FloatArray, IntArray
from gpumix.cost.network.buckets import GRADIENT_BYTES
from gpumix.cost.peak_memory import compute_free_bytes, get_element_bytes
from gpumix.planner.pipeline_parallel.call_times import CallTimesCache
from gpumix.planner.pipeline_parallel.device_order import Row
from gpumix.planner.pipeline_parallel.pipeline_estimate import (
    PipelineEstimates,
    Values,
    compute_activation_bytes,
)
from gpumix.planner.pipeline_parallel.stage_cuts import bound_busiest_s
from gpumix.planner.pipeline_parallel.stage_memory import StageMemory
from gpumix.planner.pipeline_parallel.stage_modes import (
    NO_TENSOR_PARALLEL,
    GroupKind,
    StageMode,
    StageModes,
    TensorParallelDegree,
    count_workers_by_class,
    get_group_kind,
)
from gpumix.schema.plan.plan import ZeroStage
from gpumix.schema.profile.profile import ModelProfile

TINY_S = 1e-12
MOST_HALVED = 200  # ranges of waves
MOST_CUTS = 127  # of a model; with more, nothing is bounded
SLACK = 1.0 - 1e-6  # single precision

Kinds = tuple[GroupKind, ...]
WAVE_STAGES: tuple[ZeroStage, ...] = (2, 3)


class PlanRange(NamedTuple):
    """Plans of a row that are bounded together.

    Attributes:
        size: the number of the micro-batch size.
        zero_stage: 1 for stages 0 and 1, in which each worker computes alone; None for any.
        waves: the fewest and the most.
    """

    size: int
    zero_stage: ZeroStage | None
    waves: tuple[int, int] = (1, 1)

    def parts(self) -> tuple[PlanRange, ...]:
        """Return smaller ranges with the same plans; nothing for one number of waves."""
        low, high = self.waves
        if self.zero_stage is None:
            return (
                PlanRange(self.size, 1),
                *(self._replace(zero_stage=n) for n in (WAVE_STAGES if high > 1 else ())),
            )
        if low == high:
            return ()
        middle = int((low * high) ** 0.5)
        return tuple(self._replace(waves=part) for part in ((low, middle), (middle + 1, high)))


@dataclass(frozen=True)
class _ClassTimes:
    """Workers of one class in one manner: seconds of a full micro-batch and of the smaller last
    one, as [sizes, ranges]; bytes free for state and micro-batches; and elements, as [ranges]."""

    device_class: str
    count: int
    forward_s: FloatArray
    both_s: FloatArray
    rest_s: FloatArray
    free: float
    elements: FloatArray


@dataclass(frozen=True)
class _MannerTimes:
    """A group in one manner: bytes of a waiting micro-batch, and of the running one in addition, as
    [sizes, ranges]; and seconds to sum all gradients once, as [ranges]."""

    classes: tuple[_ClassTimes, ...]
    left: FloatArray
    working: FloatArray
    reduced_s: FloatArray


class RowBounds:
    """Bounds for ways to train `batch` samples a step in micro-batches of `sizes`, below `below_s`
    seconds; each group has one stage, or two where `interleaved`."""

    def __init__(
        self,
        pace_of: CallTimesCache,
        manners: StageModes,
        batch: int,
        sizes: Sequence[int],
        below_s: float,
        *,
        interleaved: bool,
    ) -> None:
        self._interleaved = interleaved
        self._pace_of = pace_of
        self._manners = manners
        self._sizes = tuple(sizes)
        self._full = np.array([batch // size for size in sizes], float)
        self._rests = tuple(batch % size for size in sizes)
        self._counts = [-(-batch // size) for size in sizes]
        self._below_s = below_s
        # The least bound of a range that cannot be halved: others matter below only.
        self._target_s = below_s
        self._profile = pace_of.profiles[NO_TENSOR_PARALLEL]
        edges = len(self._profile.model.cuts) + 2
        of_all = PipelineEstimates(pace_of, manners, batch, sizes, most_edges=edges)
        self._begin, self._end, self._range_of = of_all.ranges
        self._elements = lru_cache(maxsize=None)(self._elements_of)
        self._activation_bytes = lru_cache(maxsize=None)(self._activation_bytes_of)
        self._manner_times = lru_cache(maxsize=None)(self._build_manner_times)
        self._busy = lru_cache(maxsize=None)(self._busy_s)
        self._suffix = lru_cache(maxsize=None)(self._suffix_s)

    @staticmethod
    def can_bound(model: ModelProfile, *, interleaved: bool) -> bool:
        """Check if a model's cuts are few, and its calls alike where a group may have two stages:
        these are bounded as one stage of as many calls."""
        once = len(set(model.calls)) == len(model.calls)
        alike = len(set(model.kind_of_call)) == 1 and once
        return len(model.cuts) <= MOST_CUTS and (alike or not interleaved)

    def least_s(self, rows: Iterable[Row]) -> float:
        """Return a lower bound of the steps of all plans of rows; at most `below_s`."""
        heap: list[tuple[float, Kinds, PlanRange]] = []
        self._target_s = self._below_s

        def put(kinds: Kinds, ranges: tuple[PlanRange, ...]) -> None:
            for one, seconds in zip(ranges, self._bound(kinds, ranges).tolist()):
                if seconds < self._target_s:
                    heapq.heappush(heap, (seconds, kinds, one))
                    if not one.parts():
                        self._target_s = seconds

        # The order of the groups does not matter, but for the ends of the model.
        for kinds in dict.fromkeys(tuple(map(get_group_kind, row)) for row in rows):
            put(kinds, self._all_ranges(kinds))
        for _ in range(MOST_HALVED):
            if not heap:
                return self._below_s
            _, kinds, one = heap[0]
            parts = one.parts()
            if not parts:
                break
            heapq.heappop(heap)
            put(kinds, parts)
        return heap[0][0] if heap else self._below_s

    def _all_ranges(self, kinds: Kinds) -> tuple[PlanRange, ...]:
        alone = all(sum(n for host in kind.hosts for _, n in host) == 1 for kind in kinds)
        return tuple(
            PlanRange(size, None, (1, 1 if alone else count))
            for size, count in enumerate(self._counts)
        )

    def _bound(self, kinds: Kinds, ranges: tuple[PlanRange, ...]) -> FloatArray:
        """Return the bound of each of `ranges`, infinite without room."""
        busy = self._suffix(kinds, ranges)[:, 0]
        return np.asarray(busy * SLACK + self._profile.step_overhead_s)

    def _suffix_s(self, kinds: Kinds, ranges: tuple[PlanRange, ...]) -> Values:
        """Return the least seconds of the busiest of these last groups of a row, as [plans, begin
        of the first]."""
        first, *others = kinds
        busy = self._busy(first, ranges, last=not others)
        if not others:
            return busy[:, self._range_of[-1]]
        later = self._suffix(tuple(others), ranges)
        found = np.full(later.shape, np.inf, np.float32)
        open_ = np.flatnonzero(
            (later.min(axis=1) < self._target_s) & (busy.min(axis=1) < self._target_s)
        )
        total = np.maximum(busy[open_][:, self._range_of.T], later[open_][:, None, :])
        found[open_] = total.min(axis=2)
        return found

    def _busy_s(self, kind: GroupKind, ranges: tuple[PlanRange, ...], *, last: bool) -> Values:
        """Return the seconds of a group with the whole batch in its best manner, infinite without
        room or beyond the limit, as [plans, ranges]. The last range is empty."""
        busy = np.full((len(ranges), len(self._begin) + 1), np.inf, np.float32)
        for manner in self._manners.of(kind, "1f1b", last=last):
            times = self._manner_times(kind, manner, last)
            busy[:, :-1] = np.minimum(busy[:, :-1], self._manner_s(times, ranges))
        return busy

    def _manner_s(self, times: _MannerTimes, ranges: tuple[PlanRange, ...]) -> Values:
        size = np.array([one.size for one in ranges])
        # Stage 3 keeps the least on each device, whatever its collectives take.
        zero_stage = np.array([one.zero_stage or 3 for one in ranges])
        any_ = np.array([one.zero_stage is None for one in ranges])[:, None]
        low, high = np.array([one.waves for one in ranges], float).T[:, :, None]
        waves, full = (zero_stage > 1)[:, None], self._full[size][:, None]
        # In waves the busiest worker computes in each; a smaller micro-batch may be alone in one.
        fastest = np.min([one.both_s[size] for one in times.classes], axis=0)
        least_workers = np.maximum(1.0, np.ceil(full * fastest / self._below_s - 1e-9))
        # Full micro-batches of a wave of all workers, or one of each that computes.
        held = np.where(waves, full / high, least_workers) * times.left[size]
        held = held + least_workers * times.working[size]
        fits, able = self._room(times, size, zero_stage, held)
        counts = [np.where(one, of.count, 0) for one, of in zip(able, times.classes)]
        fits &= np.sum(counts, axis=0) > 0
        work = self._work_s(times, size, counts)
        forward = full / np.sum(
            [n / one.forward_s[size] for n, one in zip(counts, times.classes)], axis=0
        ).clip(TINY_S)
        backward = full / np.sum(
            [n / (one.both_s - one.forward_s)[size] for n, one in zip(counts, times.classes)],
            axis=0,
        ).clip(TINY_S)
        # Stated links move half as many bytes to gather; measured ones may be faster still.
        part = 0.0 if self._profile.network else 0.5
        gathered = np.where(zero_stage == 3, part, 0.0)[:, None] * times.reduced_s
        moved = self._beside(forward, low * gathered) + self._beside(
            backward, low * (gathered + times.reduced_s)
        )
        longest = np.max([one.both_s[size] for one in times.classes], axis=0)
        # Of two stages the gradients of one are summed while the other computes.
        summed = 0.0 if self._interleaved else np.maximum(0.0, times.reduced_s - longest)
        alone = work + summed
        in_waves = np.maximum(np.maximum(work, moved), (low - 1) * fastest)
        seconds = np.where(any_, work, np.where(waves, in_waves, alone))
        return np.where(fits, seconds, np.inf)

    def _room(
        self,
        times: _MannerTimes,
        size: IntArray,
        zero_stage: IntArray,
        held: FloatArray,
    ) -> tuple[npt.NDArray[np.bool_], list[npt.NDArray[np.bool_]]]:
        """Return whether all workers together have room for the state beside `held` bytes; and by
        class, whether a worker has room for a micro-batch beside what all of them keep."""
        fits = np.ones(held.shape, bool)
        able: list[npt.NDArray[np.bool_]] = []
        # Shares of the state that have room, and the most bytes of the whole state of a class.
        shares, largest = np.zeros(held.shape), np.ones(held.shape)
        needed = (times.left + times.working)[size]
        for one in times.classes:
            each = {n: get_element_bytes(self._profile, one.device_class, n) for n in (1, 2, 3)}
            whole, own = (
                np.array([each[n][part] for n in zero_stage])[:, None] * one.elements
                for part in (0, 1)
            )
            there, own = one.free - whole, np.maximum(own, 1.0)
            able.append(there >= needed)
            fits &= there >= 0
            shares = shares + one.count * there / own
            largest = np.maximum(largest, own)
        return fits & (shares - held / largest >= np.where(largest > 1.0, 1.0, 0.0)), able

    def _work_s(
        self, times: _MannerTimes, size: IntArray, counts: Sequence[FloatArray]
    ) -> FloatArray:
        """Return seconds of the busiest of so many workers of each class."""
        full = self._full[size][:, None]
        seconds = [one.both_s[size] for one in times.classes]
        speed = np.sum([n / each for n, each in zip(counts, seconds)], axis=0).clip(TINY_S)
        rest = np.min(
            [one.rest_s[size] / each for one, each in zip(times.classes, seconds)], axis=0
        )
        work = np.maximum((full + rest) / speed, bound_busiest_s(full, seconds, counts))
        [first, *others] = times.classes
        if not others and first.count == 1:
            work = full * seconds[0] + first.rest_s[size]
        return np.asarray(work)

    def _beside(self, computed: FloatArray, moved: FloatArray) -> FloatArray:
        shorter = np.minimum(computed, moved)
        return np.asarray(np.maximum(computed, moved) + self._profile.contention * shorter)

    # -- one group in one manner ---------------------------------------------------------------

    def _build_manner_times(self, kind: GroupKind, manner: StageMode, last: bool) -> _MannerTimes:
        profile = self._pace_of.profiles[manner.tp]
        left = working = np.full((len(self._sizes), len(self._begin)), np.inf)
        rests = tuple(max(1, rest) for rest in self._rests)
        is_left = np.array([rest > 0 for rest in self._rests])[:, None]
        classes = []
        for name, count in count_workers_by_class(kind, manner.tp.degree):
            pace, smaller = (
                self._pace_of(name, manner.tp, manner.mode, sizes) for sizes in (self._sizes, rests)
            )
            forward = np.maximum(pace.compute_forward_s(self._begin, self._end), TINY_S)
            both = np.maximum(pace.stage_s(self._begin, self._end), forward + TINY_S)
            rest = smaller.stage_s(self._begin, self._end) * is_left
            free = compute_free_bytes(profile, name) - profile.model.root.buffer_bytes
            elements = self._elements(name, manner.tp)
            classes.append(_ClassTimes(name, count, forward, both, rest, free, elements))
            held = self._activation_bytes(name, manner, last=last)
            left, working = np.minimum(left, held[0]), np.minimum(working, held[1])
        rate = self._pace_of.compute_reduce_s_per_byte(kind, manner.tp)
        least = np.min([one.elements for one in classes], axis=0)
        return _MannerTimes(tuple(classes), left, working, least * GRADIENT_BYTES * rate)

    def _elements_of(self, name: str, tp: TensorParallelDegree) -> FloatArray:
        """Return the elements that surely belong to each range, as [ranges]."""
        profile = self._pace_of.profiles[tp]
        room = StageMemory(profile, profile.model_of(name))
        return room.count_exclusive_elements(self._begin, self._end)

    def _activation_bytes_of(
        self, name: str, manner: StageMode, *, last: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Return bytes of a waiting micro-batch of each range, and at least of the running one in
        addition, in the backward pass of the last call, or in the head."""
        model = self._pace_of.profiles[manner.tp].model_of(name)
        before, least = compute_activation_bytes(
            model, manner.mode, self._sizes, last=last, least=True
        )
        return before[:, self._end] - before[:, self._begin], least[:, None]
