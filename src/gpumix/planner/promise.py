"""Which plans of several stages promise most: an estimate of each row of groups, for all sizes of
micro-batches at once.

An estimate knows how long stages compute, what they send and sum, and whether there is room, but no
order. A step takes as long as its busiest stage is busy, and until the last micro-batch has gone
through the others (Narayanan et al. 2021: of p equal stages and m micro-batches m + p - 1 parts),
where it does nothing else meanwhile. A dynamic programme divides the model so that this is least;
in which manner each stage runs is decided with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gpumix.cost.buckets import GRADIENT_BYTES
from gpumix.cost.curves import FloatArray, IntArray, bytes_at
from gpumix.planner.arrange import Row, cell_of
from gpumix.planner.counted import Candidate
from gpumix.planner.manner import ALONE, Kind, Manner, Manners, Team, kind_of, teams_of
from gpumix.planner.pace import PaceOf
from gpumix.planner.way import Way, rounds_of
from gpumix.spec.plan import Schedule, ZeroStage
from gpumix.spec.profile import ModelProfile
from gpumix.spec.stage import Mode

MOST_EDGES = 65  # calls between which the model may be cut; of more, so many; 128 at most
WAVES = 2  # there are at least as many where stages gather and sum in the middle of a step
MOST_PAIRS = 8  # of two groups' devices, of which messages are looked at
TINY_S = 1e-12
# Of the way through the other stages, what a worker waits for that computes gradients of weights
# meanwhile: forward and backward, less those gradients; each about as long (Qi et al. 2023).
ZERO_BUBBLE_PART = 1 / 3

Seconds = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Stage:
    """A group that has the calls between any two edges, as [sizes, last edges, first edges] arrays.

    Attributes:
        busy_s: with the whole batch; infinite where there is no room.
        one_s: with one micro-batch.
        manner: the number of the best one.
    """

    busy_s: Seconds
    one_s: Seconds
    manner: npt.NDArray[np.int8]


@dataclass(frozen=True)
class Divided:
    """The best division of a model among the stages of a row.

    Attributes:
        seconds: [sizes] of the step; infinite where there is no room, or no manner for the
            schedule.
        waits: [sizes] whether too few micro-batches are under way for none to wait.
        begins: of each stage the edge that it begins at, [sizes, edge that it ends at].
    """

    seconds: FloatArray
    waits: npt.NDArray[np.bool_]
    stages: tuple[_Stage, ...]
    begins: tuple[npt.NDArray[np.int8], ...]


class Promises:
    """Estimates of ways to train `batch` samples a step in micro-batches of `sizes`."""

    def __init__(
        self,
        pace_of: PaceOf,
        manners: Manners,
        zero_stages: Sequence[ZeroStage],
        batch: int,
        sizes: Sequence[int],
    ) -> None:
        self._pace_of = pace_of
        self.sent_s = pace_of.sent_s
        self.manners = manners
        self.profile = pace_of.profiles[ALONE]
        self._zero_stages = zero_stages
        self.sizes = tuple(sizes)
        self.counts = -(-batch // np.array(sizes))
        model = self.profile.model
        edges = np.array([0, *model.cuts, len(model.calls)])
        chosen = np.linspace(0, len(edges) - 1, min(len(edges), MOST_EDGES))
        self.edges = edges[np.round(chosen).astype(np.int64)]
        self._rooms = pace_of.rooms
        self._holdings: dict[tuple[str, Manner, bool], _Holding] = {}
        self.stages = lru_cache(maxsize=512)(self._stages_of)
        self._elements_of: dict[Team, FloatArray] = {}

    def of(self, row: Row) -> RowPromises:
        """Those of a row."""
        return RowPromises(self, row)

    @cached_property
    def message_bytes(self) -> list[float]:
        """By size, what a unit returns, of those that return most."""
        model = self.profile.model
        curves = [model.kind(name).outputs.values() for name in set(model.kind_of_call)]
        return [
            max(sum(float(bytes_at(curve, size)) for curve in of_kind) for of_kind in curves)
            for size in self.sizes
        ]

    # -- one stage -----------------------------------------------------------------------------

    def _stages_of(
        self, kind: Kind, schedule: Schedule, waiting: float, last: bool
    ) -> Mapping[ZeroStage, _Stage]:
        """By ZeRO stage.

        Args:
            waiting: micro-batches that wait on a worker at once, beside the one that it computes,
                for each part of the group's work that it does.
        """
        shape = (len(self.sizes), len(self.edges), len(self.edges))
        found = {
            zero_stage: _Stage(
                np.full(shape, np.inf, np.float32),
                np.full(shape, np.inf, np.float32),
                np.zeros(shape, np.int8),
            )
            for zero_stage in self._zero_stages
        }
        end, begin = self.edges[:, None], self.edges[None, :]
        for number, manner in enumerate(self.manners.of(kind, schedule, last=last)):
            teams = teams_of(kind, manner.team.degree)
            profile = self._pace_of.profiles[manner.team]
            rounds, buffers = rounds_of(schedule), profile.model.root.buffer_bytes
            taken = {}
            for name, _ in teams:
                pace = self._pace_of(name, manner.team, manner.mode, self.sizes)
                taken[name] = np.maximum(pace.stage_s(begin, end), TINY_S)
            speed = sum((count / taken[name] for name, count in teams), np.zeros(shape))
            counts, held = self.counts[:, None, None], {}
            for name, _ in teams:
                part = 1 / (taken[name] * speed)  # of the micro-batches
                here = np.ceil(np.minimum(1 + waiting * part, counts * part))
                held[name] = self._held(name, manner, last).at(here) + buffers / rounds
            one_s = sum(count for _, count in teams) / speed
            measured = np.array(self.sizes) <= self.manners.largest(kind, manner.team)
            possible = measured[:, None, None] & (begin < end)
            elements = self._elements(manner.team)
            for zero_stage, best in found.items():
                room = self._rooms[manner.team].fits(teams, elements, zero_stage, held, rounds)
                summed = self._summed_s(kind, manner, zero_stage, schedule)
                busy = np.where(room & possible, counts / speed + summed, np.inf)
                better = busy < best.busy_s
                np.copyto(best.busy_s, busy, where=better, casting="same_kind")
                np.copyto(best.one_s, one_s, where=better, casting="same_kind")
                best.manner[better] = number
        return found

    def _held(self, name: str, manner: Manner, last: bool) -> _Holding:
        key = (name, manner, last)
        if key not in self._holdings:
            model = self._pace_of.profiles[manner.team].model_of(name)
            found = _Holding.of(model, manner.mode, self.sizes, self.edges, last=last)
            found = replace(found, each=found.each + np.array(self.message_bytes)[:, None, None])
            self._holdings[key] = found
        return self._holdings[key]

    def _elements(self, team: Team) -> FloatArray:
        """Trained elements of stages between edges: [1, last edges, first edges]."""
        if team not in self._elements_of:
            end, begin = self.edges[:, None], self.edges[None, :]
            self._elements_of[team] = self._rooms[team].elements(begin, end)[None]
        return self._elements_of[team]

    def _summed_s(
        self, kind: Kind, manner: Manner, zero_stage: ZeroStage, schedule: Schedule
    ) -> FloatArray:
        """Of sums of gradients, and of gathers of parameters, between the workers of a group."""
        numel = self._elements(manner.team)
        reduced = self._pace_of.s_per_byte(kind, manner.team) * GRADIENT_BYTES
        gathered = reduced / 2  # in half as many bytes, or of what need not be added up
        passes = 3 if schedule == "zero-bubble" else 2
        times = {
            0: 2 * reduced,
            1: reduced + gathered,
            2: WAVES * reduced + gathered,
            3: WAVES * (reduced + passes * gathered),
        }
        return np.asarray(numel * times[zero_stage])


class RowPromises:
    """Estimates of one row of groups."""

    def __init__(self, promises: Promises, row: Row) -> None:
        self._promises = promises
        self.row = row
        self._kinds = tuple(map(kind_of, row))
        self.divided = lru_cache(maxsize=None)(self._divided)

    def _divided(self, zero_stage: ZeroStage, schedule: Schedule) -> Divided:
        """The model among the row's stages."""
        promises, rounds = self._promises, rounds_of(schedule)
        sizes, edges = len(promises.sizes), len(promises.edges)
        busy = np.full((sizes, edges), np.inf, np.float32)
        busy[:, 0] = 0.0
        others = np.zeros_like(busy)
        each_size, each_end = np.ogrid[:sizes, :edges]
        stages, begins = [], []
        for place, kind in enumerate(self._kinds * rounds):
            last = place == len(self._kinds) * rounds - 1
            waiting = self._waiting(place % len(self._kinds), schedule)
            stage = promises.stages(kind, schedule, waiting, last)[zero_stage]
            most = np.maximum(busy[:, None, :], stage.busy_s)
            total = others[:, None, :] + stage.one_s
            begin = (most + total).argmin(axis=-1)
            busy, others = most[each_size, each_end, begin], total[each_size, each_end, begin]
            stages.append(stage)
            begins.append(begin.astype(np.int8))
        through = np.where(np.isfinite(busy[:, -1]), others[:, -1], 0.0)
        sent_s, linked_s, queued_s = self._sent_s
        # So many are under way at once, and come back only after they have gone through all stages.
        under_way = len(self.row[0]) + self._waiting(0, schedule)
        returned_s = promises.counts * (through + 2 * rounds * queued_s) / under_way
        busiest = np.maximum(busy[:, -1], linked_s * promises.counts) * rounds
        waited = ZERO_BUBBLE_PART if schedule == "zero-bubble" else 1.0
        through = through * (1 - 1 / len(stages)) * waited + 2 * rounds * sent_s
        seconds = promises.profile.step_overhead_s + np.maximum(busiest, returned_s) + through
        return Divided(seconds, returned_s > busiest, tuple(stages), tuple(begins))

    def candidate(self, zero_stage: ZeroStage, schedule: Schedule, number: int) -> Candidate | None:
        """That of size `number`; None if there is none."""
        promises, found = self._promises, self.divided(zero_stage, schedule)
        if not np.isfinite(found.seconds[number]):
            return None
        ends, manners, at = [], [], len(promises.edges) - 1
        for place in reversed(range(len(found.stages))):
            begin = int(found.begins[place][number, at])
            kind, last = self._kinds[place % len(self._kinds)], place == len(found.stages) - 1
            every = promises.manners.of(kind, schedule, last=last)
            manners.append(every[found.stages[place].manner[number, at, begin]])
            ends.append(int(promises.edges[at]))
            at = begin
        teams = [manner.team for manner in reversed(manners)]
        if teams != teams[: len(self.row)] * rounds_of(schedule):
            return None  # a group cannot change its teams between its stages
        way = Way(self.row, tuple(reversed(manners)), schedule, promises.sizes[number])
        return Candidate(way, zero_stage, tuple(reversed(ends)))

    def _waiting(self, place: int, schedule: Schedule) -> float:
        """How many micro-batches wait at a group beside those that its workers compute; of which a
        worker has its part (`Pipeline.in_flight`)."""
        if schedule == "gpipe":
            return float("inf")
        groups = len(self.row)
        if schedule == "interleaved":
            rounds = rounds_of(schedule)
            stages = 2 * (groups - place - 1) + (rounds - 1) * groups
            return len(self.row[place]) * stages / rounds
        later = sum(map(len, self.row[place + 1 :]))
        return 2.0 * later if schedule == "eager-1f1b" else float(later)

    @cached_property
    def _sent_s(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of a micro-batch's messages from group to group, in one direction: of all, over the
        busiest link between hosts, and of all if those that a link has for all workers come at
        once."""
        sizes = self._promises.message_bytes
        total, busiest, queued = (np.zeros(len(sizes)) for _ in range(3))
        for one, other in pairwise(self.row):
            here, there = ({cell_of(d): d for d in group} for group in (one, other))
            pairs = [(a, b) for a in here.values() for b in there.values()]
            pairs = pairs[:: -(-len(pairs) // MOST_PAIRS)]
            links = {frozenset((a.host, b.host)) for a, b in pairs}
            across = all(len(hosts) == 2 for hosts in links)
            ahead = max(1.0, (max(len(one), len(other)) / len(links) + 1) / 2) if across else 1.0
            for number, size in enumerate(sizes):
                mean = sum(self._promises.sent_s(a, b, size) for a, b in pairs) / len(pairs)
                total[number] += mean
                queued[number] += mean * ahead
                if across:
                    busiest[number] = max(busiest[number], mean / len(links))
        return total, busiest, queued


@dataclass(frozen=True)
class _Holding:
    """Bytes that micro-batches hold on a device: each that waits for its backward, by size and by
    edges, and the one that is computed, by size."""

    each: FloatArray
    working: FloatArray

    @classmethod
    def of(
        cls, model: ModelProfile, mode: Mode, sizes: Sequence[int], edges: IntArray, *, last: bool
    ) -> _Holding:
        """In a mode; in the `last` stage with head and loss."""
        kinds = {name: model.kind(name) for name in set(model.kind_of_call)}
        left, working = {}, np.zeros(len(sizes))
        for name, kind in kinds.items():
            kept, backward = kind.kept, kind.backward
            if not mode.recompute and kind.saved and kind.saved_backward:
                kept, backward = kind.saved, kind.saved_backward
            left[name] = bytes_at(kept, sizes)
            needed = bytes_at(backward, sizes) + bytes_at(kind.gradient, sizes)
            working = np.maximum(working, needed)
        head = model.root.head if mode.head == "whole" else model.root.chunked_head
        if last and head is not None:
            working = np.maximum(working, bytes_at(head, sizes))
        rows = [np.zeros(len(sizes)), *(left[name] for name in model.kind_of_call)]
        before = np.cumsum(rows, axis=0).T[:, edges]
        return cls(before[:, :, None] - before[:, None, :], working)

    def at(self, waiting: FloatArray) -> FloatArray:
        """So many micro-batches."""
        return np.asarray(waiting * self.each + self.working[:, None, None])
