"""The fastest plan of several stages: who stands where, which calls, which micro-batches.

A *way* is a row of groups (`planner.arrange`), a mode for each stage, a schedule and a micro-batch
size. Of each way the cuts of the calls are looked at: all if there are few, else the
one with the shortest busiest stage, by dynamic programme. No step is shorter than what its busiest
worker computes, and what comes before and after that; so candidates are counted exactly
(`cost.staged`) in the order of this least time, until no other can be shorter than the best one.
Then the plan is the fastest of all that were looked at; where there are too many to count,
`bound_s` tells how far from it the best one may be.

Inside a group micro-batches go to workers as they are fast, and state to where there is room.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, comb, prod
from typing import Literal

import numpy as np

from gpumix.cost.predict import predict
from gpumix.cost.staged import StagedStep
from gpumix.cost.time import can, chunks_cost_nothing
from gpumix.planner.arrange import Group, Row, rows
from gpumix.planner.base import PlanRequest, fit, predicted, ranked_devices
from gpumix.planner.cuts import Cutter
from gpumix.planner.misfit import Misses
from gpumix.planner.way import Counts, Cut, Deal, Way, assemble_stages
from gpumix.spec.cluster import Device
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Mode, Plan, Schedule, WorkerPrediction, ZeroStage
from gpumix.spec.profile import Profile

FEW_SIZES = 16  # micro-batch sizes; of more, so many
FEW_DEALS = 200  # ways to deal micro-batches, of which all are looked at
# Of candidates that are counted exactly: steps, and all that is done in them.
MOST_STEPS, MOST_ACTIONS = 300, 60_000
ENOUGH = 1e-9
ROUNDING_BYTES = 4096  # set aside for the rounding of cuts
ROUNDS = 2  # stages of each group, where they are interleaved

Head = Literal["whole", "chunked"]


@dataclass(frozen=True)
class _Candidate:
    """A plan but for who gets which micro-batches, and what no step of it is shorter than."""

    least_s: float
    way: Way
    zero_stage: ZeroStage
    cut: Cut


def staged(profile: Profile, request: PlanRequest, below_s: float = float("inf")) -> Plan:
    """The fastest plan of several stages.

    Args:
        below_s: what takes longer is of no interest.

    Raises:
        InputError: the request names devices that the profile does not know, there is one device
            or one unit alone, or the profile does not say what units need of each other.
        NoFeasiblePlanError: no such plan fits, or all take longer than `below_s`.
    """
    search = _Search(profile, request, below_s)
    return search.run()


def refuse_one_stage(profile: Profile, devices: Sequence[Device]) -> None:
    """Raise an InputError where there can be no plan of several stages."""
    what = ""
    if len(devices) < 2:
        what = "one device alone has one stage"
    elif len(set(profile.model.calls)) < 2:
        what = "a model of one unit has one stage"
    elif not profile.model.needs:
        what = "the profile does not say what the model's units need of each other"
    if what:
        raise InputError(
            f"there is no plan of several stages: {what}",
            fix="use `strategy: optimal`, or profile again: `gpumix profile JOB.yaml --fresh`",
        )


class _Search:
    def __init__(self, profile: Profile, request: PlanRequest, below_s: float) -> None:
        self._profile = profile
        self._batch = request.global_batch
        self._space = request.space
        self._devices = ranked_devices(profile, request)
        self._below_s = below_s
        self._cutter = Cutter(profile, request.global_batch)
        self._steps = self._actions = 0  # that were counted exactly
        self._misses = Misses("a plan of several stages")
        self._calls = len(profile.model.calls)
        refuse_one_stage(profile, self._devices)
        most = min(self._calls, len(self._devices))
        if self._space.least_stages > most:
            raise InputError(
                f"there is no plan of {self._space.least_stages} stages: there are "
                f"{len(self._devices)} devices, or teams, and {self._calls} units",
                fix=f"set techniques.least_stages to {most} at most",
            )

    def run(self) -> Plan:
        best: Plan | None = None
        best_s, bound_s = self._below_s, float("inf")
        for candidate in self._nearest_first():
            if candidate.least_s >= best_s * (1 - ENOUGH):
                break
            if self._steps > MOST_STEPS or self._actions > MOST_ACTIONS:
                bound_s = candidate.least_s
                break
            plan = self._counted(candidate, best_s)
            if plan is not None:
                best, best_s = plan, predicted(plan).step_s
        if best is None:
            raise self._misses.error(self._profile)
        expected = predicted(best).model_copy(update={"bound_s": min(bound_s, best_s)})
        return best.model_copy(update={"prediction": expected})

    # -- candidates ----------------------------------------------------------------------------

    def _nearest_first(self) -> Iterator[_Candidate]:
        """All candidates that have room for the units' state, those with the least time first. A
        way is cut when no other may have an earlier one."""
        heap: list[tuple[float, int, _Candidate | None, Iterator[_Candidate]]] = [
            (least_s, number, None, self._cut(way))
            for number, (least_s, way) in enumerate(self._ways())
        ]
        heapq.heapify(heap)
        while heap:
            _, number, candidate, others = heapq.heappop(heap)
            if candidate is not None:
                yield candidate
            if (following := next(others, None)) is not None:
                heapq.heappush(heap, (following.least_s, number, following, others))

    def _cut(self, way: Way) -> Iterator[_Candidate]:
        cuts, stages = self._cutter.cuts(way), self._zero_stages(way)
        least = np.stack([self._cutter.least_s(way, cuts, zero_stage) for zero_stage in stages])
        # Of the same least time the lower ZeRO stage comes first.
        for place in np.argsort(least.T, axis=None, kind="stable"):
            number, row = divmod(int(place), len(stages))
            least_s = float(least[row, number])
            if least_s == float("inf"):
                return
            yield _Candidate(least_s, way, stages[row], cuts.cut(number))

    def _zero_stages(self, way: Way) -> list[ZeroStage]:
        """Where each stage has one device nothing is divided; nor is zero-bubble for gradients that
        are."""
        stages = self._stages_of(way.schedule)
        return stages[:1] if max(map(len, way.row)) == 1 else stages

    def _stages_of(self, schedule: Schedule) -> list[ZeroStage]:
        """The ZeRO stages that a schedule may have."""
        stages = sorted(set(self._space.zero_stages))
        return [stage for stage in stages if stage <= 1 or schedule != "zero-bubble"]

    def _ways(self) -> Iterator[tuple[float, Way]]:
        """With seconds that no step of each is shorter than."""
        most = min(self._calls, self._space.most_stages or self._calls)
        found = [
            row for row in rows(self._devices, most)[0] if len(row) >= self._space.least_stages
        ]
        classes = sorted(Counter(device.device_class for device in self._devices).items())
        for row in found:
            for modes, schedule in self._modes(row):
                rounds = ROUNDS if schedule == "interleaved" else 1
                least = min(modes, key=lambda mode: mode.recompute)
                for size in self._sizes:
                    least_s = self._cutter.least_of(classes, size, least)
                    yield least_s, Way(row, modes * rounds, schedule, size, rounds)

    @cached_property
    def _sizes(self) -> list[int]:
        """Micro-batch sizes."""
        limits = [c.largest_micro_batch for c in self._profile.classes]
        most = min([self._batch, *(n for n in limits if n is not None)])
        every = np.arange(1, most + 1)
        if most > FEW_SIZES:
            every = np.unique(np.geomspace(1, most, FEW_SIZES).astype(np.int64))
        return [int(size) for size in every]

    def _modes(self, row: Row) -> Iterator[tuple[tuple[Mode, ...], Schedule]]:
        """Of each stage, and a schedule that runs them."""
        kept = [again for again in self._space.recompute if again or self._may_keep(row)]
        heads = self._heads(row[-1])
        stages = len(row)
        if set(kept) == {True, False}:
            some = {tuple(n < k for n in range(stages)) for k in range(stages + 1)}
            if stages <= 3:
                some |= set(product((True, False), repeat=stages))
        else:
            some = {(again,) * stages for again in kept}
        for recompute, head in product(sorted(some), heads):
            modes = tuple(
                Mode(recompute=again, head=head if n == stages - 1 else "whole")
                for n, again in enumerate(recompute)
            )
            schedules = set(self._space.schedules)
            if "1f1b" in schedules:
                yield modes, "1f1b"
            elif "gpipe" in schedules:
                yield modes, "gpipe"
            may_split = self._stages_of("zero-bubble") and self._may_split(row, recompute)
            if "zero-bubble" in schedules and may_split:
                yield modes, "zero-bubble"
            if "interleaved" in schedules and ROUNDS * stages <= self._calls:
                yield modes, "interleaved"

    def _may_keep(self, row: Row) -> bool:
        names = {device.device_class for group in row for device in group}
        return all(can(self._profile, name, Mode(recompute=False)) for name in names)

    def _may_split(self, row: Row, recompute: Sequence[bool]) -> bool:
        names = {device.device_class for group in row for device in group}
        kinds = set(self._profile.model.kind_of_call)
        times = (self._profile.of_class(name).units[kind] for name in names for kind in kinds)
        return not any(recompute) and all(t.inputs and t.weights for t in times)

    def _heads(self, group: Group) -> list[Head]:
        names = {device.device_class for device in group}
        chunks = "chunked" in self._space.heads and all(
            can(self._profile, name, Mode(head="chunked")) for name in names
        )
        if chunks and all(chunks_cost_nothing(self._profile, name) for name in names):
            return ["chunked"]
        chunked: list[Head] = ["chunked"] if chunks else []
        whole: list[Head] = ["whole"] if "whole" in self._space.heads else []
        return [*whole, *chunked]

    # -- plans ---------------------------------------------------------------------------------

    def _counted(self, candidate: _Candidate, below_s: float) -> Plan | None:
        """The plan of a candidate with its prediction; None if it does not fit or is no faster."""
        best: Plan | None = None
        for counts in self._deals(candidate, below_s):
            for waves in _waves(candidate, counts):
                plan = self._plan(candidate, counts, waves)
                if plan is None:
                    continue
                step = StagedStep(self._profile, plan)
                self._steps += 1
                self._actions += sum(map(len, step.pipeline.orders.values()))
                if step.seconds >= below_s * (1 - ENOUGH):
                    continue
                plan = self._fitting(plan, step)
                if plan is None:
                    continue
                expected = predict(self._profile, plan)
                if expected.step_s < below_s * (1 - ENOUGH):
                    best = plan.model_copy(update={"prediction": expected})
                    below_s = expected.step_s
        return best

    def _deals(self, candidate: _Candidate, below_s: float) -> Iterator[Counts]:
        """How many micro-batches each worker of each group may get: that which makes the busiest
        least busy, then all others if there are few."""
        way, cut = candidate.way, candidate.cut
        count = ceil(self._batch / way.micro_batch)
        seconds = [self._cutter.seconds(way, cut, place) for place in range(len(way.row))]
        first = tuple(spread(count, of_group) for of_group in seconds)
        yield first
        if prod(comb(count + len(group) - 1, len(group) - 1) for group in way.row) > FEW_DEALS:
            return
        every = [
            [
                deal
                for deal in _deals(count, len(of_group))
                if max(n * s for n, s in zip(deal, of_group)) < below_s
            ]
            for of_group in seconds
        ]
        yield from (deals for deals in product(*every) if deals != first)

    def _plan(self, candidate: _Candidate, counts: Counts, waves: int) -> Plan | None:
        try:
            return assemble_stages(
                self._profile,
                self._batch,
                candidate.way,
                candidate.cut,
                counts,
                zero_stage=candidate.zero_stage,
                waves=waves,
                strategy="staged",
            )
        except ValueError:
            return None  # waves that do not cut all stages' micro-batches alike

    def _fitting(self, plan: Plan, step: StagedStep) -> Plan | None:
        """The plan with state where there is room for it; None if there is too little."""
        workers = list(step.workers())
        if fit(workers):
            return plan
        moved = None if plan.zero_stage == 0 else _moved(plan, step, workers)
        if moved is not None and fit(StagedStep(self._profile, moved).workers()):
            return moved
        self._misses.note(plan, workers)
        return None


def _moved(plan: Plan, step: StagedStep, expected: Sequence[WorkerPrediction]) -> Plan | None:
    """The plan with as much state on each worker as it has room for, as equal as that allows."""
    stages = []
    for number, stage in enumerate(plan.stages):
        model, most = step.stages[number].memory, []
        for rank, worker in zip(plan.ranks_of(number), stage.workers):
            per_share = model.state(worker.compute_dtype).bytes_per_share
            free = expected[rank].memory_limit_bytes - expected[rank].peak_bytes
            most.append(min(1.0, worker.state_share + (free - ROUNDING_BYTES) / per_share))
        if min(most) < 0.0 or sum(most) < 1.0:
            return None
        workers = tuple(
            worker.model_copy(update={"state_share": share})
            for worker, share in zip(stage.workers, _filled(most))
        )
        stages.append(stage.model_copy(update={"workers": workers}))
    return plan.model_copy(update={"stages": tuple(stages)})


def _waves(candidate: _Candidate, counts: Counts) -> list[int]:
    """Into how many waves micro-batches may be divided."""
    if candidate.zero_stage < 2:
        return [1]
    groups, most = len(candidate.way.row), min(max(of_group) for of_group in counts)
    wanted = (groups, 2 * groups, 4 * groups, most)
    return sorted({min(most, waves) for waves in wanted})


def _deals(count: int, workers: int) -> Iterator[Deal]:
    """All ways to deal so many micro-batches to workers."""
    if workers == 1:
        yield (count,)
        return
    for own in range(count + 1):
        for rest in _deals(count - own, workers - 1):
            yield (own, *rest)


def spread(count: int, seconds: Sequence[float]) -> Deal:
    """So many micro-batches over workers that take `seconds` for each: the busiest as little busy
    as may be, and of two that would be as busy the first one."""
    given = [0] * len(seconds)
    heap = [(each, place) for place, each in enumerate(seconds)]
    heapq.heapify(heap)
    for _ in range(count):
        busy, place = heapq.heappop(heap)
        given[place] += 1
        heapq.heappush(heap, (busy + seconds[place], place))
    return tuple(given)


def _filled(most: Sequence[float]) -> list[float]:
    """Shares that add up to 1, as equal as `most` of each allows."""
    shares, left = [0.0] * len(most), 1.0
    order = sorted(range(len(most)), key=lambda place: most[place])
    for done, place in enumerate(order):
        shares[place] = min(most[place], left / (len(order) - done))
        left -= shares[place]
    return shares
