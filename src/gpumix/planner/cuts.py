"""Where a model may be cut into stages, with the least time that a step of each cut takes, and the
least memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from gpumix.cost.buckets import GRADIENT_BYTES
from gpumix.cost.curves import FloatArray, IntArray, bytes_at
from gpumix.cost.memory import element_bytes, free_bytes
from gpumix.cost.time import can
from gpumix.cost.wire import Messages
from gpumix.planner.manner import ALONE, Team, kind_of
from gpumix.planner.pace import Pace, PaceOf
from gpumix.planner.way import Cut, Way
from gpumix.spec.plan import Mode, ZeroStage

FEW_CUTS = 2048  # of which all are looked at
TINY_S = 1e-12
HALVINGS = 10


@dataclass(frozen=True)
class Cuts:
    """Cuts of one way: the calls that each stage begins with, and those that it ends before, as
    [cuts, stages] numbers; and seconds that no step of them is shorter than."""

    begins: IntArray
    ends: IntArray
    least_s: FloatArray

    def cut(self, number: int) -> Cut:
        return tuple(int(end) for end in self.ends[number])


class Cutter:
    """Cuts a model for ways to train `batch` samples a step."""

    def __init__(self, pace_of: PaceOf, batch: int) -> None:
        self._pace_of = pace_of
        self._profile = pace_of.profiles[ALONE]
        self._batch = batch
        self._calls = len(self._profile.model.calls)
        self._sizes: dict[int, float] = {}

    def cuts(self, way: Way) -> Cuts:
        """Those of a way."""
        stages, calls = len(way.stages), self._calls
        inner = np.array(list(combinations(range(1, calls), stages - 1)), dtype=np.int64)
        inner = inner.reshape(-1, stages - 1)
        ends = np.concatenate([inner, np.full((len(inner), 1), calls)], axis=1)
        begins = np.concatenate([np.zeros((len(inner), 1), np.int64), inner], axis=1)
        return Cuts(begins, ends, self._least_s(way, begins, ends))

    def least_of(
        self, classes: Sequence[tuple[str, int]], size: int, modes: Iterable[Mode]
    ) -> float:
        """No plan of stages takes less on these devices, of classes and their numbers: not even if
        each computed all the time, in the best of these modes, alone or in a team, what it is best
        at."""
        calls = []
        for name, _ in classes:
            seconds = [
                np.diff(self._pace_of(name, team, mode, (size,)).both_s[0]) * team.degree
                for mode in modes
                for team, profile in self._pace_of.profiles.items()
                if name in {c.device_class for c in profile.classes} and can(profile, name, mode)
            ]
            if not seconds:
                return float("inf")
            calls.append(np.maximum(np.min(seconds, axis=0), TINY_S))
        speed = sum(
            count * float((calls[0] / own).max()) for own, (_, count) in zip(calls, classes)
        )
        whole = float(calls[0].sum()) * max(1, self._batch // size)
        return whole / speed + self._profile.step_overhead_s

    def _least_s(self, way: Way, begins: IntArray, ends: IntArray) -> FloatArray:
        """No step of these cuts takes less: some worker computes so long, and before it
        micro-batches come through earlier stages, after it their gradients go back."""
        least, passed = np.zeros(len(begins)), np.zeros(len(begins))
        # Gradients of weights may be put off to the end; then only the forward pass comes before.
        whole = way.schedule != "zero-bubble"
        for place, classes in enumerate(way.teams):
            of_classes, first = [], np.full(len(begins), np.inf)
            for name, _ in classes:
                seconds = np.zeros(len(begins))
                for stage in range(place, len(way.stages), len(way.row)):
                    begin, end = begins[:, stage], ends[:, stage]
                    pace = self._pace(way, stage, name)
                    of_stage = pace.stage_s(begin, end)[0]
                    seconds += of_stage
                    if stage == place:
                        before = of_stage if whole else pace.passed_s(begin, end)[0]
                        first = np.minimum(first, before)
                of_classes.append(np.maximum(seconds, TINY_S))
            busy = _least_busy(self._count(way), of_classes, [count for _, count in classes])
            least = np.maximum(least, passed + busy)
            passed = passed + first + self._sent_s(way, place) * (2 if whole else 1)
        return least + self._profile.step_overhead_s

    def _sent_s(self, way: Way, place: int) -> float:
        """No message of one micro-batch takes less from a group to the next, whatever the cut."""
        if place + 1 == len(way.row):
            return 0.0
        if way.micro_batch not in self._sizes:
            kinds = [
                self._profile.model.kind(kind) for kind in set(self._profile.model.kind_of_call)
            ]
            curves = [curve for kind in kinds for curve in kind.outputs.values()]
            sizes = [float(bytes_at(curve, way.micro_batch)) for curve in curves]
            self._sizes[way.micro_batch] = min(sizes, default=0.0) / 2  # they may be sent narrower
        size = self._sizes[way.micro_batch]
        messages = Messages(self._profile)
        pairs = {
            (a.host, a.device_class, b.host, b.device_class): (a, b)
            for a in way.row[place]
            for b in way.row[place + 1]
        }
        return min(messages.between(a, b, size) for a, b in pairs.values())

    def _count(self, way: Way) -> int:
        """Micro-batches; what is left for a smaller one may take next to no time."""
        return max(1, self._batch // way.micro_batch)

    def _pace(self, way: Way, stage: int, name: str) -> Pace:
        manner = way.manners[stage]
        return self._pace_of(name, manner.team, manner.mode, (min(way.micro_batch, self._batch),))

    # -- memory --------------------------------------------------------------------------------

    def least_s(self, way: Way, cuts: Cuts, zero_stage: ZeroStage) -> FloatArray:
        """No step of these cuts takes less at this ZeRO stage: gradients of units are summed over a
        group, below stage 2 after its last but one pass. Infinite where their state finds no room.
        """
        least = cuts.least_s
        for place, classes in enumerate(way.teams):
            if (elements := self._elements(way.manners[place].team)) is not None:
                summed = np.zeros(len(least))
                longest = np.zeros(len(least))
                for stage in range(place, len(way.stages), len(way.row)):
                    begin, end = cuts.begins[:, stage], cuts.ends[:, stage]
                    summed += (elements[end] - elements[begin]) * GRADIENT_BYTES
                    paces = [self._pace(way, stage, name) for name, _ in classes]
                    longest += np.max([pace.stage_s(begin, end)[0] for pace in paces], axis=0)
                team = way.manners[place].team
                moved = summed * self._pace_of.s_per_byte(kind_of(way.row[place]), team)
                computed = self._busy_s(way, cuts, place) - longest if zero_stage < 2 else 0.0
                least = np.maximum(least, moved + computed)
        return np.where(self._may_fit(way, cuts, zero_stage), least, np.inf)

    def _busy_s(self, way: Way, cuts: Cuts, place: int) -> FloatArray:
        """What the busiest device of a group computes at the least, however finely it is dealt."""
        speed = np.zeros(len(cuts.least_s))
        for name, count in way.teams[place]:
            seconds = np.zeros(len(speed))
            for stage in range(place, len(way.stages), len(way.row)):
                pace = self._pace(way, stage, name)
                seconds += pace.stage_s(cuts.begins[:, stage], cuts.ends[:, stage])[0]
            speed += count / np.maximum(seconds, TINY_S)
        return np.asarray(self._count(way) / speed)

    def _may_fit(self, way: Way, cuts: Cuts, zero_stage: ZeroStage) -> npt.NDArray[np.bool_]:
        """Whether the units' state alone, without what micro-batches hold, finds room."""
        fits = np.ones(len(cuts.begins), dtype=bool)
        for place, teams in enumerate(way.teams):
            team = way.manners[place].team
            elements, profile = self._elements(team), self._pace_of.profiles[team]
            if elements is None:
                continue
            numel = np.zeros(len(fits))
            for stage in range(place, len(way.stages), len(way.row)):
                numel += elements[cuts.ends[:, stage]] - elements[cuts.begins[:, stage]]
            room, needed = np.zeros(len(fits)), np.zeros(len(fits))
            for name, count in teams:
                whole, owned = element_bytes(profile, name, zero_stage)
                left = free_bytes(profile, name) - numel * whole
                fits &= left >= 0
                room += count * left
                needed = np.maximum(needed, numel * owned)
            fits &= room >= needed
        return fits

    def _elements(self, team: Team) -> FloatArray | None:
        """Trained elements of all calls before each, of which each of a team has its part; None
        where a unit is called twice."""
        model = self._pace_of.profiles[team].model
        if len(set(model.calls)) < len(model.calls):
            return None
        sizes = {kind.name: kind.trainable for kind in model.kinds}
        each = [sizes[kind] for kind in model.kind_of_call]
        return np.concatenate([[0.0], np.cumsum(each)])


def _least_busy(count: int, seconds: Sequence[FloatArray], devices: Sequence[int]) -> FloatArray:
    """The least that the busiest device computes if so many micro-batches are dealt, each whole:
    from below, to a part in a thousand.

    Args:
        seconds: of one micro-batch on a device of each class.
        devices: of each class.
    """
    speed = sum((n / s for n, s in zip(devices, seconds)), np.zeros(1))
    low = count / speed
    high = low + np.max(seconds, axis=0)
    low, high = np.broadcast_arrays(low, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        done = sum((n * np.floor(middle / s) for n, s in zip(devices, seconds)), np.zeros(1))
        low, high = np.where(done < count, middle, low), np.where(done < count, high, middle)
    return np.asarray(low)
