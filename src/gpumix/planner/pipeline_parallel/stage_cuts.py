"""Cuts of a model into stages, with the least step time and the least memory of each cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from gpumix.cost.memory_layout.curves import FloatArray, IntArray, interpolate_bytes
from gpumix.cost.network.buckets import GRADIENT_BYTES
from gpumix.planner.data_parallel.class_options import list_corner_sizes
from gpumix.planner.pipeline_parallel.call_times import CallTimes, CallTimesCache
from gpumix.planner.pipeline_parallel.candidate import Cut, UncutCandidate
from gpumix.planner.pipeline_parallel.device_order import Row, get_device_place
from gpumix.planner.pipeline_parallel.stage_modes import (
    NO_TENSOR_PARALLEL,
    StageMode,
    StageModes,
    count_workers_by_class,
    get_group_kind,
)
from gpumix.schema.plan.plan import ZeroStage

FEW_CUTS = 2048  # up to this many, all are tried
TINY_S = 1e-12
BISECTION_STEPS = 10


@dataclass(frozen=True)
class StageCuts:
    """Cuts of one way: the first call of each stage and the call after the last, as [cuts, stages]
    numbers, and a lower bound of each step in seconds."""

    begins: IntArray
    ends: IntArray
    least_s: FloatArray

    def cut(self, number: int) -> Cut:
        return tuple(int(end) for end in self.ends[number])


class Cutter:
    """Cuts of a model, and lower bounds, for ways to train `batch` samples a step."""

    def __init__(self, pace_of: CallTimesCache, batch: int) -> None:
        self._pace_of = pace_of
        self._profile = pace_of.profiles[NO_TENSOR_PARALLEL]
        self._batch = batch
        self._sizes: dict[int, float] = {}
        self._known_jobs: dict[tuple[str, StageMode, tuple[int, ...]], FloatArray] = {}

    def cuts(self, way: UncutCandidate) -> StageCuts:
        """Return all cuts of a way."""
        stages, calls = len(way.stages), len(self._profile.model.calls)
        allowed = self._profile.model.cuts
        inner = np.array(list(combinations(allowed, stages - 1)), dtype=np.int64)
        inner = inner.reshape(-1, stages - 1)
        ends = np.concatenate([inner, np.full((len(inner), 1), calls)], axis=1)
        begins = np.concatenate([np.zeros((len(inner), 1), np.int64), inner], axis=1)
        return StageCuts(begins, ends, self._least_s(way, begins, ends))

    def bound_cut(self, way: UncutCandidate, cut: Cut, zero_stage: ZeroStage) -> float:
        """Return a lower bound of the step of a single cut of a way; see `least_s`."""
        begins, ends = np.array([(0, *cut[:-1])]), np.array([cut])
        cuts = StageCuts(begins, ends, self._least_s(way, begins, ends))
        return float(self.least_s(way, cuts, zero_stage)[0])

    def bound_all_plans(self, classes: Iterable[tuple[str, int]], manners: StageModes) -> float:
        """Return a lower bound of staged plans on devices, given as classes with counts: each
        device always computes its best work, in the best of all manners and sizes."""
        each, speed = [], 0.0
        for name, count in classes:
            of_class = [self._least_per_sample(name, manner) for manner in manners.of_class(name)]
            each.append(np.maximum(np.min(of_class, axis=0), TINY_S))
            speed += count * float((each[0] / each[-1]).max())
        return self._batch * float(each[0].sum()) / speed + self._profile.step_overhead_s

    def bound_row(self, row: Row, manners: Sequence[StageMode], sizes: Sequence[int]) -> FloatArray:
        """Return lower bounds of a row's step by micro-batch size, wherever the model is cut: each
        device always computes its best work."""
        workers: list[tuple[FloatArray, int]] = []
        for place, group in enumerate(row):
            of_group = manners[place :: len(row)]
            for name, count in count_workers_by_class(get_group_kind(group), of_group[0].tp.degree):
                every = (
                    self._compute_job_seconds(name, manner, tuple(sizes)) for manner in of_group
                )
                workers.append((reduce(np.minimum, every), count))
        # Jobs without work, as without a smaller last micro-batch, occupy no device.
        first = np.where(workers[0][0] > TINY_S, workers[0][0], 0.0)
        speed = sum(count * (first / jobs).max(axis=1) for jobs, count in workers)
        return np.asarray(first.sum(axis=1) / speed + self._profile.step_overhead_s)

    def _compute_job_seconds(
        self, name: str, manner: StageMode, sizes: tuple[int, ...]
    ) -> FloatArray:
        """Return seconds of all work on a device of a class, as [sizes, jobs]: of each call all
        full micro-batches, and the rest."""
        key = (name, manner, sizes)
        if key not in self._known_jobs:
            counts, rests = np.divmod(self._batch, np.array(sizes))
            parts = []
            for each, times in ((sizes, counts), (np.maximum(rests, 1), rests > 0)):
                asked = tuple(map(int, each))
                both_s = self._pace_of(name, manner.tp, manner.mode, asked).both_s
                parts.append(np.diff(both_s, axis=1) * times[:, None])
            self._known_jobs[key] = np.maximum(np.concatenate(parts, axis=1), TINY_S)
        return self._known_jobs[key]

    def _least_per_sample(self, name: str, manner: StageMode) -> FloatArray:
        """Return each call's least device seconds per sample, over all measured micro-batches."""
        profile = self._pace_of.profiles[manner.tp]
        limit = min(self._batch, profile.of_class(name).largest_micro_batch or self._batch)
        sizes = np.array(list_corner_sizes(profile, name, limit))
        both_s = self._pace_of(name, manner.tp, manner.mode, tuple(map(int, sizes))).both_s
        seconds = np.diff(both_s, axis=1) * manner.tp.degree
        return np.asarray((seconds / sizes[:, None]).min(axis=0))

    def _least_s(self, way: UncutCandidate, begins: IntArray, ends: IntArray) -> FloatArray:
        """Return a lower bound of each cut's step: a worker's computing, plus the way of a
        micro-batch through earlier stages, and of gradients back."""
        least, passed = np.zeros(len(begins)), np.zeros(len(begins))
        # Zero-bubble may defer weight gradients to the end: only the forward pass comes before.
        whole = way.schedule != "zero-bubble"
        for place, classes in enumerate(way.workers_by_class):
            of_classes, left_s = [], np.zeros(len(begins))
            come, go = np.full(len(begins), np.inf), np.full(len(begins), np.inf)
            for name, _ in classes:
                seconds = np.zeros(len(begins))
                for stage in range(place, len(way.stages), len(way.row)):
                    begin, end = begins[:, stage], ends[:, stage]
                    pace = self._pace(way, stage, name)
                    of_stage = pace.stage_s(begin, end)[0]
                    seconds += of_stage
                    left = self._left(way, stage, name)
                    if left is not None:
                        left_s += left.stage_s(begin, end)[0]
                    # A micro-batch comes first and another goes back last, each on any worker;
                    # either may be the smaller one.
                    for one in (pace, left) if stage == place else ():
                        if one is not None:
                            passed_s = one.compute_forward_s(begin, end)[0]
                            come = np.minimum(come, passed_s)
                            go = np.minimum(go, one.stage_s(begin, end)[0] - passed_s)
                of_classes.append(np.maximum(seconds, TINY_S))
            busy = bound_busiest_s(self._count(way), of_classes, [count for _, count in classes])
            if sum(count for _, count in classes) == 1:
                busy = busy + left_s
            least = np.maximum(least, passed + busy)
            passed = passed + come + self._sent_s(way, place)
            if whole:
                passed = passed + go + self._sent_s(way, place)
        return least + self._profile.step_overhead_s

    def _samples_left(self, way: UncutCandidate) -> int:
        """Return the samples of a smaller last micro-batch; 0 if none."""
        return self._batch % way.micro_batch if self._batch > way.micro_batch else 0

    def _left(self, way: UncutCandidate, stage: int, name: str) -> CallTimes | None:
        """Return the pace of a smaller last micro-batch, if any."""
        left, manner = self._samples_left(way), way.manners[stage]
        return self._pace_of(name, manner.tp, manner.mode, (left,)) if left else None

    def _sent_s(self, way: UncutCandidate, place: int) -> float:
        """Return a lower bound of a micro-batch's message to the next group, for any cut."""
        if place + 1 == len(way.row):
            return 0.0
        samples = self._samples_left(way) or way.micro_batch
        if samples not in self._sizes:
            kinds = [
                self._profile.model.kind(kind) for kind in set(self._profile.model.kind_of_call)
            ]
            curves = [curve for kind in kinds for curve in kind.outputs.values()]
            sizes = [float(interpolate_bytes(curve, samples)) for curve in curves]
            self._sizes[samples] = min(sizes, default=0.0) / 2  # messages may be narrower
        size = self._sizes[samples]
        here, there = (
            {get_device_place(d): d for d in group}.values() for group in way.row[place : place + 2]
        )
        return min(float(self._pace_of.sent_s(a, b, (size,))[0]) for a, b in product(here, there))

    def _count(self, way: UncutCandidate) -> int:
        """Count full micro-batches; a smaller last micro-batch may take next to no time."""
        return max(1, self._batch // way.micro_batch)

    def _pace(self, way: UncutCandidate, stage: int, name: str) -> CallTimes:
        manner = way.manners[stage]
        return self._pace_of(name, manner.tp, manner.mode, (min(way.micro_batch, self._batch),))

    # -- memory --------------------------------------------------------------------------------

    def least_s(self, way: UncutCandidate, cuts: StageCuts, zero_stage: ZeroStage) -> FloatArray:
        """Return lower bounds of the step at a ZeRO stage; infinite where the state has no room.
        Gradients of units are summed over a group, below stage 2 not before its last pass."""
        least = cuts.least_s
        for place, classes in enumerate(way.workers_by_class):
            summed = self._least_elements(way, cuts, place) * GRADIENT_BYTES
            longest = np.zeros(len(least))
            for stage in range(place, len(way.stages), len(way.row)):
                begin, end = cuts.begins[:, stage], cuts.ends[:, stage]
                paces = [self._pace(way, stage, name) for name, _ in classes]
                longest += np.max([pace.stage_s(begin, end)[0] for pace in paces], axis=0)
            tp = way.manners[place].tp
            moved = summed * self._pace_of.compute_reduce_s_per_byte(
                get_group_kind(way.row[place]), tp
            )
            computed = self._busy_s(way, cuts, place) - longest if zero_stage < 2 else 0.0
            least = np.maximum(least, np.where(summed > 0, moved + computed, 0.0))
        return np.where(self._may_fit(way, cuts, zero_stage), least, np.inf)

    def _busy_s(self, way: UncutCandidate, cuts: StageCuts, place: int) -> FloatArray:
        """Return the least work of a group's busiest device, for any deal of micro-batches."""
        speed = np.zeros(len(cuts.least_s))
        for name, count in way.workers_by_class[place]:
            seconds = np.zeros(len(speed))
            for stage in range(place, len(way.stages), len(way.row)):
                pace = self._pace(way, stage, name)
                seconds += pace.stage_s(cuts.begins[:, stage], cuts.ends[:, stage])[0]
            speed += count / np.maximum(seconds, TINY_S)
        return np.asarray(self._count(way) / speed)

    def _may_fit(
        self, way: UncutCandidate, cuts: StageCuts, zero_stage: ZeroStage
    ) -> npt.NDArray[np.bool_]:
        """Return True where the state of units has room, without any micro-batch."""
        fits = np.ones(len(cuts.begins), dtype=bool)
        for place, workers in enumerate(way.workers_by_class):
            room = self._pace_of.rooms[way.manners[place].tp]
            fits &= room.fits(workers, self._least_elements(way, cuts, place), zero_stage)
        return fits

    def _least_elements(self, way: UncutCandidate, cuts: StageCuts, place: int) -> FloatArray:
        """Return the trained elements belonging to a group alone, in all stages of the group."""
        room = self._pace_of.rooms[way.manners[place].tp]
        stages = range(place, len(way.stages), len(way.row))
        every = (room.count_exclusive_elements(cuts.begins[:, n], cuts.ends[:, n]) for n in stages)
        return sum(every, np.zeros(len(cuts.begins)))


def bound_busiest_s(
    count: int | FloatArray, seconds: Sequence[FloatArray], devices: Sequence[int | FloatArray]
) -> FloatArray:
    """Return a lower bound, to a part in a thousand, of the busiest device's seconds with `count`
    micro-batches dealt whole.

    Args:
        seconds: of one micro-batch on a device of each class.
        devices: of each class; one at least.
    """
    whole = np.asarray(count, float)
    if len(seconds) == 1:
        return np.asarray(np.ceil(whole / np.maximum(devices[0], 1)) * seconds[0])
    speed = sum((n / s for n, s in zip(devices, seconds)), np.zeros(1))
    low = whole / np.maximum(speed, TINY_S)
    high = low + np.max(seconds, axis=0)
    low, high = np.broadcast_arrays(low, high)
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        done = sum((n * np.floor(middle / s) for n, s in zip(devices, seconds)), np.zeros(1))
        low, high = np.where(done < whole, middle, low), np.where(done < whole, high, middle)
    return np.asarray(low)
