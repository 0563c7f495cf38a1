"""What every rank of a plan does in one step, in order, before any of it has a time.

A rank's script reads as `engine.layered` does: it issues collectives, waits for them, and computes.
Seconds are those of `cost`. Ranks that are alike share one script. A worker that runs its
micro-batches one after the other goes through all calls for each; its gathers go with the first
forward, its regathers and reductions with the last backward. Below ZeRO stage 3 parameters have a
place for life, so all gathers are issued at once; below stage 2 gradients do, so nothing computed
waits for a reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpumix.cost.curves import MicroBatches
from gpumix.cost.network import Links, unit_sizes
from gpumix.cost.predict import check_match, links_of_plan, update_seconds
from gpumix.cost.time import NOTHING, Computing, backward_calls, forward_calls
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Plan, Worker, ZeroStage
from gpumix.spec.profile import ROOT, ModelProfile, Profile
from gpumix.spec.trace import Move, Work

OUTSIDE = -1  # in the place of a call's number: the root unit


@dataclass(frozen=True)
class Task:
    """What a rank computes without a break: one unit for some micro-batches.

    `copied_s` is the time that the copies to or from the host take beside it. It starts when the
    first `needs` collectives are done.
    """

    kind: Work
    call: int
    seconds: float
    copied_s: float
    micro_batches: tuple[int, ...]
    needs: int


@dataclass(frozen=True)
class Collective:
    """What all ranks do together. Nothing is computed beside an `exposed` one."""

    kind: Move
    call: int
    seconds: float
    exposed: bool


@dataclass(frozen=True)
class Lane:
    """Ranks that are alike. Each issues collective c when `issued[c]` of its tasks are done."""

    ranks: tuple[int, ...]
    worker: Worker
    tasks: tuple[Task, ...]
    issued: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """One step of a plan. `contention` is what a collective and computing cost each other."""

    calls: tuple[str, ...]
    lanes: tuple[Lane, ...]
    collectives: tuple[Collective, ...]
    overhead_s: float
    contention: float

    def unit(self, call: int) -> str:
        """The name of the unit of a call."""
        return ROOT if call == OUTSIDE else self.calls[call]


def program_of(profile: Profile, plan: Plan) -> Program:
    """What the ranks of `plan` do in a step.

    Raises:
        InputError: the profile is of another model, sequence length or precision, or lacks a
            device, a mode or a collective form of the plan.
    """
    check_match(profile, plan)
    _check_devices(profile, plan)
    links, ranks = links_of_plan(profile, plan), len(plan.workers)
    moves = _Moves(profile.model, links, plan.zero_stage, ranks)
    lanes: list[Lane] = []
    order: list[tuple[Move, int]] = []
    for worker, update_s, alike in _alike(plan, update_seconds(profile, plan)):
        script = _Script(profile, worker, moves)
        script.write(update_s)
        assert not lanes or order == list(script.order), "ranks issue different collectives"
        order = list(script.order)
        lanes.append(Lane(tuple(alike), worker, tuple(script.tasks), tuple(script.issued)))
    return Program(
        calls=profile.model.calls,
        lanes=tuple(lanes),
        collectives=tuple(moves.collective(*move) for move in order),
        overhead_s=profile.step_overhead_s,
        contention=links.contention,
    )


def _check_devices(profile: Profile, plan: Plan) -> None:
    known = {(device.id, device.device_class) for device in profile.cluster.devices}
    for worker in plan.workers:
        if (worker.device, worker.device_class) not in known:
            raise InputError(
                f"the plan's device '{worker.device}' ({worker.device_class}) is not in the "
                "profile's cluster",
                fix="give the profile that the plan was made from, or plan again from this one",
            )


def _alike(plan: Plan, updates: list[float]) -> Iterator[tuple[Worker, float, list[int]]]:
    """Workers that do the same, by the first of them, with the time of their update."""
    ranks: dict[object, list[int]] = {}
    workers = plan.workers
    for rank, (w, update_s) in enumerate(zip(workers, updates)):
        alike = (w.device_class, w.samples, w.micro_batch, w.mode, update_s)
        ranks.setdefault(alike, []).append(rank)
    for found in ranks.values():
        yield workers[found[0]], updates[found[0]], found


class _Moves:
    """Which collectives a step has, and how long each takes. One that takes no time is there all
    the same: ranks meet in it."""

    def __init__(
        self, model: ModelProfile, links: Links, zero_stage: ZeroStage, ranks: int
    ) -> None:
        self._kinds, self._links, self._ranks = model.kind_of_call, links, ranks
        self._sizes = unit_sizes(model)
        self._last = len(model.calls) - 1
        calls, kinds = model.calls, model.kind_of_call
        self._ahead = [gathered != NOTHING for _, gathered in forward_calls(calls, kinds)]
        self._behind = backward_calls(calls, kinds)
        self.zero_stage = zero_stage

    def has(self, kind: Move, call: int) -> bool:
        """Whether this collective is issued for this call, rather than for a neighbour or not at
        all."""
        if self._ranks == 1:
            return False
        size = self._sizes[self._kind(call)]
        if kind == "gather":
            gathered = size.trainable or (size.frozen_bytes and self.zero_stage == 3)
            return self.zero_stage > 0 and bool(gathered) and (call < 1 or self._ahead[call - 1])
        if kind == "regather":
            here = call == self._last or self._behind[call + 1][1] != NOTHING
            return self.zero_stage == 3 and here and bool(size.trainable or size.frozen_bytes)
        if kind == "reduce":
            return size.trainable > 0 and (call < 1 or self._behind[call - 1][2] != NOTHING)
        return True

    def collective(self, kind: Move, call: int) -> Collective:
        links = self._links
        seconds = {
            "gather": links.gather_s,
            "regather": links.regather_s,
            "reduce": links.reduce_s,
            "meet": dict.fromkeys(links.reduce_s, 0.0),
        }[kind][self._kind(call)]
        exposed = call == OUTSIDE or (kind == "reduce" and call == 0)
        return Collective(kind, call, seconds, exposed)

    def _kind(self, call: int) -> str:
        return ROOT if call == OUTSIDE else self._kinds[call]


class _Script:
    """The tasks of one worker, and the collectives between them."""

    def __init__(self, profile: Profile, worker: Worker, moves: _Moves) -> None:
        self._profile, self._worker, self._moves = profile, worker, moves
        self._calls = range(len(profile.model.calls))
        self._needs = 0
        self._reducing: int | None = None  # the call whose reduction may be under way
        self._seconds: dict[object, tuple[float, float]] = {}
        self.tasks: list[Task] = []
        self.order: dict[tuple[Move, int], int] = {}
        self.issued: list[int] = []

    def write(self, update_s: float) -> None:
        """The whole step."""
        whole = self._moves.zero_stage < 3
        self._issue("gather", OUTSIDE)
        for call in self._calls if whole else (0,):
            self._issue("gather", call)
        self._wait("gather", OUTSIDE)
        rounds = self._rounds()
        for number, micro in enumerate(rounds):
            self._forward(micro, gathers=number == 0)
            self._backward(micro, reduces=number == len(rounds) - 1)
        self._issue("reduce", OUTSIDE)
        self._issue("meet", OUTSIDE)
        self._wait("meet", OUTSIDE)
        self.tasks.append(Task("optimizer", OUTSIDE, update_s, 0.0, (), self._needs))

    def _rounds(self) -> list[tuple[int, ...]]:
        """Micro-batches that go through each unit together; one after the other, the smaller one
        first."""
        micro = self._worker.micro_batches
        if self._worker.mode.order == "layered" or not micro:
            return [micro]
        return [(samples,) for samples in reversed(micro)]

    def _forward(self, micro: tuple[int, ...], *, gathers: bool) -> None:
        self._compute("forward", OUTSIDE, micro)
        for call in self._calls:
            if gathers:
                self._wait("gather", call)
                if call + 1 < len(self._calls):
                    self._issue("gather", call + 1)
            self._compute("forward", call, micro)

    def _backward(self, micro: tuple[int, ...], *, reduces: bool) -> None:
        if reduces:
            self._issue("regather", self._calls[-1])
        self._compute("head", OUTSIDE, micro)
        for call in reversed(self._calls):
            if reduces:
                self._wait("regather", call)
                if call:
                    self._issue("regather", call - 1)
            self._compute("backward", call, micro)
            if reduces:
                self._reduce(call)

    def _reduce(self, call: int) -> None:
        """From stage 2 on, no more than two gradients are on their way at a time."""
        if self._issue("reduce", call) and self._moves.zero_stage >= 2:
            if self._reducing is not None:
                self._wait("reduce", self._reducing)
            self._reducing = call

    def _issue(self, kind: Move, call: int) -> bool:
        """Whether there is such a collective, and it was not issued before."""
        if (kind, call) in self.order or not self._moves.has(kind, call):
            return False
        self.order[kind, call] = len(self.order)
        self.issued.append(len(self.tasks))
        return True

    def _wait(self, kind: Move, call: int) -> None:
        if (kind, call) in self.order:
            self._needs = max(self._needs, self.order[kind, call] + 1)

    def _compute(self, kind: Work, call: int, micro: tuple[int, ...]) -> None:
        seconds, copied_s = self._times(kind, call, micro)
        self.tasks.append(Task(kind, call, seconds, copied_s, micro, self._needs))

    def _times(self, kind: Work, call: int, micro: tuple[int, ...]) -> tuple[float, float]:
        """Seconds to compute and to copy."""
        model = self._profile.model
        name = ROOT if call == OUTSIDE else model.kind_of_call[call]
        key = (kind, name, micro)
        if key not in self._seconds:
            computing = Computing(
                model,
                self._profile.of_class(self._worker.device_class),
                MicroBatches.of([sum(micro)], [max(micro, default=0)]),
                self._worker.mode,
            )
            times = computing.forward_s if kind == "forward" else computing.backward_s
            copied = 0.0 if name == ROOT else float(computing.copied_s(name)[0])
            self._seconds[key] = float(times(name)[0]), copied
        return self._seconds[key]
