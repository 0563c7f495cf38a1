"""Rebalancing of samples between devices while a run trains.

Every step reports how long each rank computed. If another split would make steps clearly shorter,
samples move: for a GPU that throttles or is shared, and for a wrong profile. Pure: all ranks see
equal times and reach the same split in the same step.

A device taking f times the planned time is assumed to do so for samples and optimizer alike. The
split minimizes the time of the slowest device: sample after sample goes where it ends first, the
optimum if more samples never take less time; in several waves that of each wave (`sample_dealer`).
Devices of a host that reads samples more slowly than they compute are as fast as the host reads.
Where memory rules a split out, state moves to devices with room, if the move pays for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gpumix.schema.plan.plan import Plan
from gpumix.schema.units import show_seconds
from gpumix.train.elastic.device_pace import (
    DevicePace,
    compute_lower_bound_s,
    limit_by_reading,
    predict_pace,
)
from gpumix.train.elastic.sample_dealer import SampleDealer

# Least gain, by the shortest times of WINDOW_STEPS steps in a row, that changes a split: a single
# event is no reason.
LEAST_GAIN = 0.08
WINDOW_STEPS = 3
# Least gain by the times of each of the steps: differences between steps are noise.
LEAST_GAIN_EACH = 0.04
# Each change makes the next one within CALM_STEPS wait for WARIER_STEPS more steps, and each failed
# change in a row makes all later ones wait for FAILED_STEPS more: it brought less than half of the
# least gain, or lost more than it gained by the next change. An undo waits no longer than a first
# change, so a device that is slow now and then has the samples that suit it best.
CALM_STEPS = 30
WARIER_STEPS = 2
FAILED_STEPS = 6
MOST_WINDOW_STEPS = 60
# Least gain of the remaining steps by moving state, in multiples of the time of the move.
WORTH = 2.0


@dataclass(frozen=True)
class SplitChange:
    """New split of the samples by tensor-parallel group, with the reason. Times are the longest
    compute time of a device in a step.

    `shares` are the new shares of the state if state moves, which takes `moving_s`.
    """

    samples: tuple[int, ...]
    before_s: float
    after_s: float
    why: str
    shares: tuple[float, ...] | None = None
    moving_s: float = 0.0


@dataclass(frozen=True)
class MovedShares:
    """Samples and state shares of each device after a move, and the time of the move."""

    samples: tuple[int, ...]
    shares: tuple[float, ...]
    seconds: float


class SplitLimits:
    """Memory limits of devices, without moves of state: `most` samples fit each group's memory,
    next to its state."""

    def __init__(self, most: Sequence[int]) -> None:
        self.most = most

    def fits(self, samples: Sequence[int]) -> bool:
        """Return whether there is memory for a split within `most`."""
        return True

    def moved(self, paces: Sequence[DevicePace]) -> MovedShares | None:
        """Return the best split with state moved to where there is room, for groups of these paces;
        None if impossible."""
        return None


@dataclass
class _Last:
    """Last change made for the better, as far as known.

    Attributes:
        samples: the split before; None if state moved too, which is not undone.
        to_beat_s: step time to beat; None once beaten or `failed`.
        took_s, instead_s: time of the steps since, and their time by the samples before.
    """

    samples: tuple[int, ...] | None
    to_beat_s: float | None
    failed: bool = False
    steps: int = 0
    took_s: float = 0.0
    instead_s: float = 0.0

    @property
    def gained_s(self) -> float:
        return self.instead_s - self.took_s

    def why_undone(self) -> str:
        took, instead = (show_seconds(s / self.steps) for s in (self.took_s, self.instead_s))
        return f"the last split is undone: by it steps took {took} instead of {instead}"


class Rebalancer:
    """Rebalancing by the compute times of ranks, step by step, from the split of a one-stage plan.

    Args:
        steps: total number of steps.
        read_per_s: samples per second that hosts can read; hosts left out read as many as wanted.
        idle: paces, by number, of groups without samples in the plan; such groups without a known
            pace get none.
    """

    def __init__(
        self,
        plan: Plan,
        room: SplitLimits,
        *,
        steps: int,
        read_per_s: Mapping[str, float] = {},
        idle: Mapping[int, DevicePace] = {},
    ) -> None:
        (stage,) = plan.stages
        leaders = stage.leaders
        self.samples = tuple(worker.samples for worker in leaders)
        """Samples of each group, now."""
        self._devices = [worker.device for worker in leaders]
        self._hosts = [worker.host for worker in leaders]
        self._read_per_s = read_per_s
        self._idle = idle
        self._least = [int(n > 0) for n in self.samples]
        self._ranks = plan.list_tp_groups(0)
        self._steps = steps
        self.go_on(plan, room)
        self._times: deque[list[float]] = deque(maxlen=MOST_WINDOW_STEPS)
        self._changed: list[int] = []
        self._step = 0
        self._of_before = False  # the next times are of the step before a change
        self._failures = 0
        self._last: _Last | None = None

    def go_on(self, plan: Plan, room: SplitLimits) -> None:
        """Take paces and memory limits of the devices from `plan`, after state moved."""
        leaders = plan.stages[0].leaders
        self._room = room
        self._dealer = SampleDealer.of(plan)
        self._most = [
            limit if least or group in self._idle else 0
            for group, (least, limit) in enumerate(zip(self._least, room.most))
        ]
        self._planned = [
            self._idle.get(group) or predict_pace(plan, worker)
            for group, worker in enumerate(leaders)
        ]
        self._refused: list[DevicePace] = []  # paces for which no state moves

    def observe(self, compute_s: Sequence[float]) -> SplitChange | None:
        """Record the compute times of the step before this one; return a worthwhile change of the
        samples from the next step on.

        Args:
            compute_s: in the order of the plan's workers; 0 for a step that does not count.
        """
        self._step += 1
        of_before, self._of_before = self._of_before, False
        times = [max(compute_s[rank] for rank in ranks) for ranks in self._ranks]
        if of_before or any(n and not s > 0 for s, n in zip(times, self.samples)):
            self._times.clear()
            return None
        self._times.append(times)
        if self._last is not None and self._last.samples is not None:
            took_s, instead_s = self._take_s(times, self.samples, self._last.samples)
            self._last.steps += 1
            self._last.took_s += took_s
            self._last.instead_s += instead_s
        window = self._window()
        undone = self._if_each_gains(self._find_undo, WINDOW_STEPS) if self._last else None
        change = undone or self._if_each_gains(self._find_better_split, window)
        if self._last and len(self._times) >= window:
            self._judge(max(self._shortest(window)))
        if change is None:
            return None
        self._count_failure(undone=undone is not None)
        self._last = (
            None
            if undone
            else _Last(
                samples=self.samples if change.shares is None else None,
                to_beat_s=change.before_s * (1.0 - LEAST_GAIN / 2),
            )
        )
        self._times.clear()
        self._changed.append(self._step)
        self._of_before = True
        self.samples = change.samples
        return change

    def _if_each_gains(
        self, find: Callable[[list[float]], SplitChange | None], window: int
    ) -> SplitChange | None:
        """Return the change found from the last `window` steps, if right in each of the steps."""
        if len(self._times) < window:
            return None
        change = find(self._shortest(window))
        recent = list(self._times)[-window:]
        return change if change and all(self._gains(change, times) for times in recent) else None

    def _shortest(self, window: int) -> list[float]:
        return list(map(min, *list(self._times)[-window:]))

    def _find_undo(self, seconds: list[float]) -> SplitChange | None:
        """Return to the previous samples, if the last change lost more than it gained."""
        last = self._last
        if last is None or last.samples is None or last.gained_s >= 0:
            return None
        if any(n > limit for n, limit in zip(last.samples, self._most)):
            return None
        before_s, after_s = self._take_s(seconds, self.samples, last.samples)
        if after_s > before_s * (1.0 - LEAST_GAIN):
            return None
        return SplitChange(last.samples, before_s, after_s, last.why_undone())

    def _judge(self, seconds: float) -> None:
        """Judge the last change, once its effect is known."""
        last = self._last
        if last is not None and last.to_beat_s is not None:
            last.failed, last.to_beat_s = seconds > last.to_beat_s, None
            self._failures += last.failed

    def _count_failure(self, *, undone: bool) -> None:
        """Count the failures in a row, when the next change is made."""
        last = self._last
        if last is None or last.failed:
            return
        self._failures = self._failures + 1 if undone or last.gained_s < 0 else 0

    def _window(self) -> int:
        recent = sum(self._step - step < CALM_STEPS for step in self._changed)
        warier = WARIER_STEPS * recent + FAILED_STEPS * self._failures
        return min(MOST_WINDOW_STEPS, WINDOW_STEPS + warier)

    def _find_better_split(self, seconds: list[float]) -> SplitChange | None:
        now, paces = self.samples, self._paces(seconds)
        before_s = self._dealer.step_s(paces, now)
        may = [pace for pace, limit in zip(paces, self._most) if limit]
        if before_s * (1.0 - LEAST_GAIN) <= compute_lower_bound_s(may, sum(now)):
            return None
        every = self._dealer.find_splits(sum(now), paces, self._most, self._least)
        samples = next(filter(self._room.fits, every), None)
        after_s = before_s if samples is None else self._dealer.step_s(paces, samples)
        moved = self._moved(paces, min(before_s, after_s))
        if moved is not None:
            after_s = self._dealer.step_s(paces, moved.samples)
            why = self._why(seconds)
            return SplitChange(moved.samples, before_s, after_s, why, moved.shares, moved.seconds)
        if samples is None or after_s > before_s * (1.0 - LEAST_GAIN):
            return None
        return SplitChange(samples, before_s, after_s, self._why(seconds))

    def _moved(self, paces: list[DevicePace], still_s: float) -> MovedShares | None:
        """Return a split with moved state, if clearly faster than `still_s` without moves, and if
        the remaining steps make up for the move."""
        limits = [sum(self.samples) if most else 0 for most in self._most]
        best = self._dealer.find_splits(sum(self.samples), paces, limits, self._least)
        if not best or self._dealer.step_s(paces, best[0]) > still_s * (1.0 - LEAST_GAIN):
            return None
        if self._refused and all(map(_alike, paces, self._refused)):
            return None
        moved = self._room.moved(paces)
        if moved is not None:
            after_s = self._dealer.step_s(paces, moved.samples)
            gained_s = (still_s - after_s) * (self._steps - self._step)
            if after_s <= still_s * (1.0 - LEAST_GAIN) and gained_s >= WORTH * moved.seconds:
                return moved
        self._refused = paces
        return None

    def _paces(self, seconds: Sequence[float]) -> list[DevicePace]:
        """Return the present paces. Groups without samples have the planned pace times the median
        deviation."""
        factors = self._factors(seconds)
        usual = _median(factors.values())
        paces = [pace.times(factors.get(group, usual)) for group, pace in enumerate(self._planned)]
        reads = [host if n else "" for host, n in zip(self._hosts, self.samples)]
        return limit_by_reading(paces, reads, self._read_per_s)

    def _factors(self, seconds: Sequence[float]) -> dict[int, float]:
        """Return actual over planned time of each group with samples."""
        every = enumerate(zip(self._planned, self.samples, seconds))
        return {group: s / planned.seconds(n) for group, (planned, n, s) in every if n}

    def _gains(self, change: SplitChange, seconds: Sequence[float]) -> bool:
        """Return True if the change would have been right in a step."""
        after_s, before_s = self._take_s(seconds, change.samples, self.samples)
        return after_s <= before_s * (1.0 - LEAST_GAIN_EACH)

    def _take_s(self, seconds: Sequence[float], *splits: Sequence[int]) -> list[float]:
        """Return the step time of each split, if devices take `seconds` now."""
        paces = self._paces(seconds)
        return [self._dealer.step_s(paces, samples) for samples in splits]

    def _why(self, seconds: list[float]) -> str:
        """Describe the device deviating most from the rest, against the plan."""
        factors = self._factors(seconds)
        usual = _median(factors.values())
        group = max(factors, key=lambda n: max(factors[n] / usual, usual / factors[n]))
        factor = factors[group] / usual
        times = f"{factor:.2f} times as long as" if factor >= 1 else f"{factor:.2f} of the time of"
        return f"device '{self._devices[group]}' takes {times} the others, against the plan"


def _median(factors: Collection[float]) -> float:
    """Return the median, the upper of two."""
    return sorted(factors)[len(factors) // 2]


def _alike(one: DevicePace, other: DevicePace) -> bool:
    return abs(one.sample_s - other.sample_s) <= LEAST_GAIN_EACH * other.sample_s
