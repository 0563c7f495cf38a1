"""Where a model may be cut into stages, with the least time that a step of each cut takes, and the
least memory.

All cuts are looked at if there are few; else the one with the shortest busiest stage, which a
dynamic programme finds, and whose busiest stage bounds that of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt

from gpumix.cost.buckets import GRADIENT_BYTES
from gpumix.cost.curves import FloatArray, IntArray, bytes_at
from gpumix.cost.memory import (
    MASTER_BYTES,
    SHARD_GRADIENT_BYTES,
    free_bytes,
)
from gpumix.cost.wire import Messages, Operation, forms_for, wire_among
from gpumix.planner.arrange import Group
from gpumix.planner.pace import Pace
from gpumix.planner.way import Cut, Way
from gpumix.spec.plan import DTYPE_BYTES, Mode, ZeroStage
from gpumix.spec.profile import Profile

FEW_CUTS = 2048  # of which all are looked at
TINY_S = 1e-12
HALVINGS = 20


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

    def __init__(self, profile: Profile, batch: int) -> None:
        self._profile = profile
        self._batch = batch
        self._calls = len(profile.model.calls)
        self._paces: dict[tuple[str, int, Mode], Pace] = {}
        self._sizes: dict[int, float] = {}
        self._rates: dict[tuple[tuple[str, str], ...], float] = {}
        self._least: dict[tuple[str, int, Mode], float] = {}

    def cuts(self, way: Way) -> Cuts:
        """Those of a way."""
        stages, calls = len(way.stages), self._calls
        if comb(calls - 1, stages - 1) <= FEW_CUTS:
            inner = np.array(list(combinations(range(1, calls), stages - 1)), dtype=np.int64)
            inner = inner.reshape(-1, stages - 1)
        else:
            inner = np.array([self._best(way)], dtype=np.int64)
        ends = np.concatenate([inner, np.full((len(inner), 1), calls)], axis=1)
        begins = np.concatenate([np.zeros((len(inner), 1), np.int64), inner], axis=1)
        return Cuts(begins, ends, self._least_s(way, begins, ends))

    def seconds(self, way: Way, cut: Cut, place: int) -> list[float]:
        """Of one micro-batch on each worker of a group, in all of its stages."""
        found = [0.0] * len(way.row[place])
        for stage in range(place, len(cut), len(way.row)):
            begin = np.array([cut[stage - 1] if stage else 0])
            for n, device in enumerate(way.row[place]):
                pace = self._pace(way, stage, device.device_class)
                found[n] += float(pace.stage_s(begin, np.array([cut[stage]]))[0])
        return found

    def least_of(self, classes: Sequence[tuple[str, int]], size: int, mode: Mode) -> float:
        """No plan of stages takes less on these devices, of classes and their numbers: not even if
        each computed all the time, in no other mode, what it is best at."""
        if (classes[0][0], size, mode) not in self._least:
            paces = [self._pace_of(name, min(size, self._batch), mode) for name, _ in classes]
            calls = [np.maximum(np.diff(pace.both_s), TINY_S) for pace in paces]
            speed = sum(
                count * float((calls[0] / own).max()) for own, (_, count) in zip(calls, classes)
            )
            whole = float(calls[0].sum()) * max(1, self._batch // size)
            self._least[classes[0][0], size, mode] = whole / speed
        return self._least[classes[0][0], size, mode] + self._profile.step_overhead_s

    def _least_s(self, way: Way, begins: IntArray, ends: IntArray) -> FloatArray:
        """No step of these cuts takes less: some worker computes so long, and before it
        micro-batches come through earlier stages, after it their gradients go back."""
        least, passed = np.zeros(len(begins)), np.zeros(len(begins))
        # Gradients of weights may be put off to the end; then only the forward pass comes before.
        whole = way.schedule != "zero-bubble"
        for place, classes in enumerate(way.classes):
            of_classes, first = [], np.full(len(begins), np.inf)
            for name, _ in classes:
                seconds = np.zeros(len(begins))
                for stage in range(place, len(way.stages), len(way.row)):
                    begin, end = begins[:, stage], ends[:, stage]
                    pace = self._pace(way, stage, name)
                    of_stage = pace.stage_s(begin, end)
                    seconds += of_stage
                    if stage == place:
                        before = of_stage if whole else pace.passed_s(begin, end)
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

    def _best(self, way: Way) -> list[int]:
        """The cut with the shortest busiest stage."""

        def busy_s(stage: int, begin: IntArray, end: IntArray) -> FloatArray:
            speed = np.zeros(len(begin))
            for name, count in way.classes[stage % len(way.row)]:
                seconds = self._pace(way, stage, name).stage_s(begin, end)
                speed += count / np.maximum(seconds, TINY_S)
            return np.asarray(1.0 / speed)

        return least_most(self._calls, len(way.stages), busy_s)

    def _pace(self, way: Way, stage: int, name: str) -> Pace:
        return self._pace_of(name, min(way.micro_batch, self._batch), way.modes[stage])

    def _pace_of(self, name: str, size: int, mode: Mode) -> Pace:
        key = (name, size, mode)
        if key not in self._paces:
            self._paces[key] = Pace.of(self._profile, name, size, mode)
        return self._paces[key]

    # -- memory --------------------------------------------------------------------------------

    def least_s(self, way: Way, cuts: Cuts, zero_stage: ZeroStage) -> FloatArray:
        """No step of these cuts takes less at this ZeRO stage: gradients of units are summed over a
        group, below stage 2 after its last but one pass. Infinite where their state finds no room.
        """
        least, elements = cuts.least_s, self._elements
        if elements is not None:
            for place, classes in enumerate(way.classes):
                summed = np.zeros(len(least))
                longest = np.zeros(len(least))
                for stage in range(place, len(way.stages), len(way.row)):
                    begin, end = cuts.begins[:, stage], cuts.ends[:, stage]
                    summed += (elements[end] - elements[begin]) * GRADIENT_BYTES
                    paces = [self._pace(way, stage, name) for name, _ in classes]
                    longest += np.max([pace.stage_s(begin, end) for pace in paces], axis=0)
                moved = summed * self._s_per_byte(way.row[place])
                computed = self._busy_s(way, cuts, place) - longest if zero_stage < 2 else 0.0
                least = np.maximum(least, moved + computed)
        return np.where(self._may_fit(way, cuts, zero_stage), least, np.inf)

    def _busy_s(self, way: Way, cuts: Cuts, place: int) -> FloatArray:
        """What the busiest device of a group computes at the least, however finely it is dealt."""
        speed = np.zeros(len(cuts.least_s))
        for name, count in way.classes[place]:
            seconds = np.zeros(len(speed))
            for stage in range(place, len(way.stages), len(way.row)):
                pace = self._pace(way, stage, name)
                seconds += pace.stage_s(cuts.begins[:, stage], cuts.ends[:, stage])
            speed += count / np.maximum(seconds, TINY_S)
        return np.asarray(self._count(way) / speed)

    def _s_per_byte(self, group: Group) -> float:
        """Seconds to sum a byte of the gradient over a group, where many are summed at once."""
        key = tuple((device.host, device.device_class) for device in group)
        if key not in self._rates:
            wire, form = wire_among(self._profile, key), forms_for(self._profile).reduce
            size = max(1, self._profile.model.parameters) * GRADIENT_BYTES
            ways: tuple[tuple[Operation, str], ...] = (("reduce", form), ("sum", "native"))
            seconds = [wire.seconds(*way, "all", size) for way in ways if wire.knows(*way, "all")]
            self._rates[key] = min(seconds, default=0.0) / size
        return self._rates[key]

    def _may_fit(self, way: Way, cuts: Cuts, zero_stage: ZeroStage) -> npt.NDArray[np.bool_]:
        """Whether the units' state alone, without what micro-batches hold, finds room."""
        profile = self._profile
        elements = self._elements
        if elements is None:
            return np.ones(len(cuts.begins), dtype=bool)
        fits = np.ones(len(cuts.begins), dtype=bool)
        for place, classes in enumerate(way.classes):
            numel = np.zeros(len(fits))
            for stage in range(place, len(way.stages), len(way.row)):
                numel += elements[cuts.ends[:, stage]] - elements[cuts.begins[:, stage]]
            room = np.zeros(len(fits))
            for name, count in classes:
                dtype = profile.of_class(name).compute_dtype
                width = DTYPE_BYTES[dtype]
                whole = (width if zero_stage < 3 else 0) + (4 if zero_stage < 2 else 0)
                left = free_bytes(profile, name) - numel * whole
                fits &= left >= 0
                room += count * np.maximum(left, 0)
            owned = profile.optimizer_bytes_per_element
            owned += MASTER_BYTES if zero_stage == 3 else 0
            owned += SHARD_GRADIENT_BYTES if zero_stage >= 2 else 0
            copies = sum(count for _, count in classes) if zero_stage == 0 else 1
            fits &= room >= numel * owned * copies
        return fits

    @cached_property
    def _elements(self) -> FloatArray | None:
        """Trained elements of all calls before each; None where a unit is called twice."""
        model = self._profile.model
        if len(set(model.calls)) < len(model.calls):
            return None
        sizes = {kind.name: kind.trainable for kind in model.kinds}
        each = [sizes[kind] for kind in model.kind_of_call]
        return np.concatenate([[0.0], np.cumsum(each)])


def least_most(
    calls: int, stages: int, cost: Callable[[int, IntArray, IntArray], FloatArray]
) -> list[int]:
    """The ends of all stages but the last, where the costliest costs least: by dynamic programme.

    Args:
        cost: of a stage that has calls [begin, end), for many of these at once.
    """
    begin, end = np.triu_indices(calls + 1, k=1)
    best = np.full(calls + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for stage in range(stages):
        of_stage = np.full((calls + 1, calls + 1), np.inf)
        of_stage[begin, end] = cost(stage, begin, end)
        most = np.maximum(best[:, None], of_stage)
        chosen.append(most.argmin(axis=0))
        best = most.min(axis=0)
    cut, at = [], calls
    for places in reversed(chosen[1:]):
        at = int(places[at])
        cut.append(at)
    return cut[::-1]


def _least_busy(count: int, seconds: Sequence[FloatArray], devices: Sequence[int]) -> FloatArray:
    """The least that the busiest device computes if so many micro-batches are dealt, each whole:
    from below, to a part in a million.

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
