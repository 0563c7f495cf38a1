"""The work of every rank in one step of a plan, in order, before start times are known.

A rank's script follows `engine.schedule.layered_schedule`: it issues collectives, waits for them,
and computes. Durations come from `cost`. Identical ranks share one script. A worker that runs its
micro-batches one after another (`engine.schedule.sequential_schedule`) goes through all calls for
each; gathers go with the first forward, reductions with the last backward. At ZeRO stage 0 all
reductions may be in flight at once; otherwise one ends before the next begins.

A collective is named by a call: the first of the run of calls it is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gpumix.cost.memory_layout.curves import MicroBatches
from gpumix.cost.network.buckets import BucketRun
from gpumix.cost.network.collective_times import CollectiveSeconds
from gpumix.cost.predict import (
    check_plan_matches_profile,
    compute_plan_collectives,
    predict_update_seconds,
)
from gpumix.cost.step_time import ComputeSeconds
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan, ZeroStage
from gpumix.schema.plan.stage import Worker
from gpumix.schema.plan.step_trace import Move, Work
from gpumix.schema.profile.profile import ROOT, Profile
from gpumix.simulate.replay import (
    ROOT_AFTER_CALL,
    ROOT_BEFORE_CALL,
    ROOT_BUCKETS,
    ROOT_CALL,
    EqualRanks,
)


@dataclass(frozen=True)
class RankTask:
    """Uninterrupted computation of a rank: one unit for some micro-batches.

    `copied_s` is the time of copies to or from the host during the computation. The task starts
    when the first `needs` collectives are done.
    """

    kind: Work
    call: int
    seconds: float
    copied_s: float
    micro_batches: tuple[int, ...]
    needs: int


@dataclass(frozen=True)
class Collective:
    """A collective of all ranks. No computation overlaps an `exposed` collective."""

    kind: Move
    call: int
    seconds: float
    exposed: bool


@dataclass(frozen=True)
class RankLane(EqualRanks):
    """Identical ranks with their tasks: each issues collective c when `issued[c]` tasks are
    done."""

    tasks: tuple[RankTask, ...]
    issued: tuple[int, ...]


@dataclass(frozen=True)
class StepProgram:
    """A step of a plan. `contention` is the mutual slowdown of collectives and computation."""

    calls: tuple[str, ...]
    lanes: tuple[RankLane, ...]
    collectives: tuple[Collective, ...]
    overhead_s: float
    contention: float


def build_program(profile: Profile, plan: Plan) -> StepProgram:
    """Return the program of the ranks of `plan` for one step.

    Raises:
        InputError: the profile is of another model, sequence length or precision, or lacks a
            device, a mode or a collective form of the plan.
    """
    check_plan_matches_profile(profile, plan)
    check_devices(profile, plan)
    links, ranks = compute_plan_collectives(profile, plan), len(plan.workers)
    moves = _StepCollectives(links, plan.zero_stage, ranks)
    lanes: list[RankLane] = []
    order: list[tuple[Move, int]] = []
    for worker, update_s, alike in _group_equal_workers(
        plan, predict_update_seconds(profile, plan)
    ):
        script = _WorkerScript(profile, worker, moves)
        script.write(plan.waves, update_s)
        assert not lanes or order == script.order, "ranks issue different collectives"
        order = script.order
        lanes.append(RankLane(tuple(alike), worker, tuple(script.tasks), tuple(script.issued)))
    return StepProgram(
        calls=profile.model.calls,
        lanes=tuple(lanes),
        collectives=tuple(moves.collective(*move) for move in order),
        overhead_s=profile.step_overhead_s,
        contention=links.contention,
    )


def check_devices(profile: Profile, plan: Plan) -> None:
    """Raise an InputError where the profile's cluster lacks a device of the plan."""
    known = {(device.id, device.device_class) for device in profile.cluster.devices}
    for worker in plan.workers:
        if (worker.device, worker.device_class) not in known:
            raise InputError(
                f"the plan's device '{worker.device}' ({worker.device_class}) is not in the "
                "profile's cluster",
                code="device-not-in-profile",
                fix="give the profile that the plan was made from, or plan again from this one",
            )


def _group_equal_workers(
    plan: Plan, updates: list[float]
) -> Iterator[tuple[Worker, float, list[int]]]:
    """Group identical workers; yield the first of each group, the time of its update, and the
    ranks."""
    ranks: dict[object, list[int]] = {}
    workers = plan.workers
    for rank, (w, update_s) in enumerate(zip(workers, updates)):
        alike = (w.device_class, w.samples, w.micro_batch, w.mode, w.kept_graphs, update_s)
        ranks.setdefault(alike, []).append(rank)
    for found in ranks.values():
        yield workers[found[0]], updates[found[0]], found


class _StepCollectives:
    """The collectives of a step and their durations. A collective without a duration still
    synchronizes ranks."""

    def __init__(self, links: CollectiveSeconds, zero_stage: ZeroStage, ranks: int) -> None:
        self._links, self._ranks = links, ranks
        self.zero_stage = zero_stage
        self.runs = links.buckets.runs
        self.run_of = {run.first: number for number, run in enumerate(self.runs)}

    def has_collective(self, kind: Move, call: int) -> bool:
        """Return whether the step has this collective."""
        if self._ranks == 1 and self._links.parameters_on == "device":
            return False
        if kind == "meet":
            return True
        size = self._links.buckets.sizes[self._name(call)]
        anything = bool(size.trainable or size.frozen_bytes)
        if kind == "gather":
            gathered = anything if self.zero_stage == 3 else size.trainable > 0
            return self.zero_stage > 0 and gathered
        if kind == "regather":
            return self.zero_stage == 3 and anything
        reduces = call < 0 or self.run_of[call] in self._links.buckets.reduced_after
        return size.trainable > 0 and reduces

    def collective(self, kind: Move, call: int) -> Collective:
        links = self._links
        seconds = {
            "gather": links.gather_s,
            "regather": links.regather_s,
            "reduce": links.reduce_s,
            "meet": dict.fromkeys(links.reduce_s, 0.0),
        }[kind][self._name(call)]
        ends = (
            (ROOT_CALL, ROOT_BEFORE_CALL) if kind == "gather" else (ROOT_CALL, ROOT_BEFORE_CALL, 0)
        )
        return Collective(kind, call, seconds, exposed=kind != "regather" and call in ends)

    def _name(self, call: int) -> str:
        return ROOT_BUCKETS[call] if call < 0 else self._links.buckets.kind(self.run_of[call])


class _WorkerScript:
    """The tasks of one worker, and the collectives between tasks."""

    def __init__(self, profile: Profile, worker: Worker, moves: _StepCollectives) -> None:
        self._profile, self._worker, self._moves = profile, worker, moves
        self._runs = moves.runs
        self._needs = 0
        self._reducing: int | None = None  # the call whose reduction may be in flight
        self._seconds: dict[object, tuple[float, float]] = {}
        self.tasks: list[RankTask] = []
        self.order: list[tuple[Move, int]] = []
        self._last: dict[tuple[Move, int], int] = {}  # index of the last of each collective
        self.issued: list[int] = []

    def write(self, waves: int, update_s: float) -> None:
        """Write the script of the whole step."""
        for wave in range(waves):
            self._write_wave(wave, waves)
        self._issue("meet", ROOT_CALL)
        self._wait("meet", ROOT_CALL)
        self.tasks.append(RankTask("optimizer", ROOT_CALL, update_s, 0.0, (), self._needs))

    def _write_wave(self, wave: int, waves: int) -> None:
        """Write the script of a wave. Parameters are gathered again unless they stay."""
        gathers = wave == 0 or self._moves.zero_stage == 3
        if gathers:
            starts = (ROOT_BEFORE_CALL, ROOT_CALL, 0) if wave == 0 else (ROOT_BEFORE_CALL, 0)
            for call in starts:
                self._issue("gather", call)
            self._wait("gather", ROOT_BEFORE_CALL)
            self._wait("gather", ROOT_CALL)
        rounds = self._rounds(wave, waves)
        for number, places in enumerate(rounds):
            self._forward(places, gathers=gathers and number == 0)
            self._backward(places, reduces=number == len(rounds) - 1)
        for call in (ROOT_CALL, ROOT_BEFORE_CALL):
            self._reduce(call)
        if wave + 1 < waves and self._reducing is not None:
            self._wait("reduce", self._reducing)

    def _rounds(self, wave: int, waves: int) -> list[tuple[int, ...]]:
        """Return the places of a wave's micro-batches going through each unit together: all, or
        singly from the last."""
        batches = len(self._worker.micro_batches)
        places = tuple(range(batches * wave // waves, batches * (wave + 1) // waves))
        if self._worker.mode.order == "layered" or not places:
            return [places]
        return [(place,) for place in reversed(places)]

    def _forward(self, places: tuple[int, ...], *, gathers: bool) -> None:
        self._compute("forward", ROOT_CALL, places)
        ahead = [*(run.first for run in self._runs[1:]), ROOT_AFTER_CALL]
        for run, following in zip(self._runs, ahead):
            if gathers:
                self._wait("gather", run.first)
                self._issue("gather", following)
            for call in _calls(run):
                self._compute("forward", call, places)
        if gathers:
            self._wait("gather", ROOT_AFTER_CALL)

    def _backward(self, places: tuple[int, ...], *, reduces: bool) -> None:
        self._compute("head", ROOT_CALL, places)
        if reduces:
            self._reduce(ROOT_AFTER_CALL)
        for number in reversed(range(len(self._runs))):
            run = self._runs[number]
            if reduces:
                self._wait("regather", run.first)
                if number:
                    self._issue("regather", self._runs[number - 1].first)
            for call in reversed(_calls(run)):
                self._compute("backward", call, places)
            if reduces:
                self._reduce(run.first)

    def _reduce(self, call: int) -> None:
        """Issue a reduction; with sharded state, after the previous one ends."""
        if not self._moves.has_collective("reduce", call):
            return
        if self._reducing is not None and self._moves.zero_stage > 0:
            self._wait("reduce", self._reducing)
        self._issue("reduce", call)
        self._reducing = call

    def _issue(self, kind: Move, call: int) -> None:
        if self._moves.has_collective(kind, call):
            self._last[kind, call] = len(self.order)
            self.order.append((kind, call))
            self.issued.append(len(self.tasks))

    def _wait(self, kind: Move, call: int) -> None:
        if (kind, call) in self._last:
            self._needs = max(self._needs, self._last[kind, call] + 1)

    def _compute(self, kind: Work, call: int, places: tuple[int, ...]) -> None:
        micro = tuple(self._worker.micro_batches[place] for place in places)
        graphs = self._kept(call, places) if kind == "backward" else 0
        seconds, copied_s = self._times(kind, call, micro, graphs)
        self.tasks.append(RankTask(kind, call, seconds, copied_s, micro, self._needs))

    def _kept(self, call: int, places: tuple[int, ...]) -> int:
        """Return how many of the micro-batches, always the last, keep the graph of `call` without
        recomputation."""
        batches = len(self._worker.micro_batches)
        calls = len(self._profile.model.calls)
        first = calls * batches - self._worker.kept_graphs
        return sum(call * batches + place >= first for place in places)

    def _times(
        self, kind: Work, call: int, micro: tuple[int, ...], graphs: int
    ) -> tuple[float, float]:
        """Return the seconds to compute and to copy."""
        model = self._profile.model_of(self._worker.device_class)
        name = ROOT if call == ROOT_CALL else model.kind_of_call[call]
        key = (kind, name, micro, graphs)
        if key not in self._seconds:
            computing = ComputeSeconds(
                model,
                self._profile.of_class(self._worker.device_class),
                MicroBatches.of([sum(micro)], [max(micro, default=0)]),
                self._worker.mode,
            )
            times = computing.forward_s if kind == "forward" else computing.backward_s
            copied = 0.0 if name == ROOT else float(computing.copied_s(name)[0])
            seconds = times(name)
            if graphs:
                last = len(model.calls) - 1
                seconds = computing.backward_with_graphs(name, np.asarray([graphs]), last)
            self._seconds[key] = float(seconds[0]), copied
        return self._seconds[key]


def _calls(run: BucketRun) -> range:
    return range(run.first, run.last + 1)
