"""Which samples each device computes, decided anew while a run trains.

Every step tells how long each rank computed. If the samples could be split so that steps take
clearly less time, they are: for a card that throttles or is shared with others, and for a profile
that was wrong. Pure: all ranks see the same times and come to the same split in the same step.

A device that takes f times as long as the plan says is taken to do so for its samples and for its
optimizer alike. The split is that of the smallest time of the slowest device: sample after sample
goes to where it ends first, which is the optimum where more samples never take less time. Devices
of a host that reads samples more slowly than they compute them are as fast as it reads. Where
memory forbids that, state moves to devices that have room, if that pays for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpumix.spec.plan import Plan
from gpumix.spec.units import show_seconds
from gpumix.train.paces import Pace, bound_s, planned_pace, slowest_s, split, with_data

# A split is changed if steps come to take so much less time by the shortest times of so many steps
# in a row: what happens once is no reason.
LEAST_GAIN = 0.08
WINDOW_STEPS = 3
# And so much less by the times of each of them: what differs from step to step is noise.
LEAST_GAIN_EACH = 0.04
# Each change makes the next one within so many steps ask for so many steps more; and each in a row
# that failed, all later ones: it did not bring half of the least gain, or by the next one more was
# lost by it than gained. What was lost is no reason to wait: a change is undone as soon as the
# first one is made, and so a device that is slow now and then has the samples that suit it best.
CALM_STEPS = 30
WARIER_STEPS = 2
FAILED_STEPS = 6
MOST_WINDOW_STEPS = 60
# State moves if the steps to come gain so many times what the move takes.
WORTH = 2.0


@dataclass(frozen=True)
class Change:
    """A new split of the samples, by team of the plan, and why; times are those that the devices
    compute in a step, where it takes longest.

    `shares` are those of the state, if that is to move, which is to take `moving_s`.
    """

    samples: tuple[int, ...]
    before_s: float
    after_s: float
    why: str
    shares: tuple[float, ...] | None = None
    moving_s: float = 0.0


@dataclass(frozen=True)
class Moved:
    """Samples of each device, what it stores of the state then, and what moving that takes."""

    samples: tuple[int, ...]
    shares: tuple[float, ...]
    seconds: float


class Room(Protocol):
    """What memory lets devices compute. `most` samples each team has memory for, beside what it
    stores."""

    @property
    def most(self) -> Sequence[int]: ...

    def moved(self, paces: Sequence[Pace]) -> Moved | None:
        """The best split if state moves to where there is room for it, for teams of these paces;
        None if it cannot."""


@dataclass(frozen=True)
class Fixed:
    """Room where no state moves."""

    most: Sequence[int]

    def moved(self, paces: Sequence[Pace]) -> Moved | None:
        return None


@dataclass
class _Last:
    """The last change that was for the better, as far as was known.

    Attributes:
        samples: those before it; None: state moved too, and nothing goes back.
        to_beat_s: by what steps take then; None: it did, or `failed`.
        took_s, instead_s: of steps so far, and what they would have taken by the samples before.
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
    """Watches how long ranks compute, step after step, from the split of a plan of one stage on.

    Args:
        steps: how many there are to be.
        read_per_s: samples that hosts can read; others read as many as are wanted.
        idle: how fast teams are, by their number, to which the plan gives no samples; those of
            which that is not known get none.
    """

    def __init__(
        self,
        plan: Plan,
        room: Room,
        *,
        steps: int,
        read_per_s: Mapping[str, float] = {},
        idle: Mapping[int, Pace] = {},
    ) -> None:
        (stage,) = plan.stages
        leaders = [team[0] for team in stage.teams]
        self.samples = tuple(worker.samples for worker in leaders)
        """Of each team, now."""
        self._devices = [worker.device for worker in leaders]
        self._hosts = [worker.host for worker in leaders]
        self._read_per_s = read_per_s
        self._idle = idle
        self._least = [int(n > 0) for n in self.samples]
        self._ranks = plan.teams_of(0)
        self._steps = steps
        self.go_on(plan, room)
        self._times: deque[list[float]] = deque(maxlen=MOST_WINDOW_STEPS)
        self._changed: list[int] = []
        self._step = 0
        self._of_before = False  # what comes next is of the step before a change
        self._failures = 0
        self._last: _Last | None = None

    def go_on(self, plan: Plan, room: Room) -> None:
        """State has moved: what the same devices take, and have memory for, is by `plan` now."""
        leaders = [team[0] for team in plan.stages[0].teams]
        self._room = room
        self._most = [
            limit if least or team in self._idle else 0
            for team, (least, limit) in enumerate(zip(self._least, room.most))
        ]
        self._planned = [
            self._idle.get(team) or planned_pace(plan, worker)
            for team, worker in enumerate(leaders)
        ]
        self._refused: list[Pace] = []  # those for which no state moves

    def observe(self, compute_s: Sequence[float]) -> Change | None:
        """Take in how long each rank computed in the step before this one; a change of the samples
        from the next step on, if it is worth it.

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
        undone = self._if_each_gains(self._undone, WINDOW_STEPS) if self._last else None
        change = undone or self._if_each_gains(self._better, window)
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
        self, find: Callable[[list[float]], Change | None], window: int
    ) -> Change | None:
        """The change that is found by so many steps, if it would have been right in each."""
        if len(self._times) < window:
            return None
        change = find(self._shortest(window))
        recent = list(self._times)[-window:]
        return change if change and all(self._gains(change, times) for times in recent) else None

    def _shortest(self, window: int) -> list[float]:
        return list(map(min, *list(self._times)[-window:]))

    def _undone(self, seconds: list[float]) -> Change | None:
        """Samples as they were, if the last change has lost more than it gained."""
        last = self._last
        if last is None or last.samples is None or last.gained_s >= 0:
            return None
        if any(n > limit for n, limit in zip(last.samples, self._most)):
            return None
        before_s, after_s = self._take_s(seconds, self.samples, last.samples)
        if after_s > before_s * (1.0 - LEAST_GAIN):
            return None
        return Change(last.samples, before_s, after_s, last.why_undone())

    def _judge(self, seconds: float) -> None:
        """What came of the last change, once it is known."""
        last = self._last
        if last is not None and last.to_beat_s is not None:
            last.failed, last.to_beat_s = seconds > last.to_beat_s, None
            self._failures += last.failed

    def _count_failure(self, *, undone: bool) -> None:
        """Of the last change, at the next one."""
        last = self._last
        if last is None or last.failed:
            return
        self._failures = self._failures + 1 if undone or last.gained_s < 0 else 0

    def _window(self) -> int:
        recent = sum(self._step - step < CALM_STEPS for step in self._changed)
        warier = WARIER_STEPS * recent + FAILED_STEPS * self._failures
        return min(MOST_WINDOW_STEPS, WINDOW_STEPS + warier)

    def _better(self, seconds: list[float]) -> Change | None:
        now, paces = self.samples, self._paces(seconds)
        before_s = slowest_s(paces, now)
        may = [pace for pace, limit in zip(paces, self._most) if limit]
        if before_s * (1.0 - LEAST_GAIN) <= bound_s(may, sum(now)):
            return None
        samples = split(sum(now), paces, self._most, self._least)
        after_s = before_s if samples is None else slowest_s(paces, samples)
        moved = self._moved(paces, min(before_s, after_s))
        if moved is not None:
            after_s = slowest_s(paces, moved.samples)
            why = self._why(seconds)
            return Change(moved.samples, before_s, after_s, why, moved.shares, moved.seconds)
        if samples is None or after_s > before_s * (1.0 - LEAST_GAIN):
            return None
        return Change(samples, before_s, after_s, self._why(seconds))

    def _moved(self, paces: list[Pace], still_s: float) -> Moved | None:
        """A split for which state moves, if it takes clearly less time than one without, which
        takes `still_s`, and so much less that the steps to come make up for the move."""
        limits = [sum(self.samples) if most else 0 for most in self._most]
        best = split(sum(self.samples), paces, limits, self._least)
        if best is None or slowest_s(paces, best) > still_s * (1.0 - LEAST_GAIN):
            return None
        if self._refused and all(map(_alike, paces, self._refused)):
            return None
        moved = self._room.moved(paces)
        if moved is not None:
            after_s = slowest_s(paces, moved.samples)
            gained_s = (still_s - after_s) * (self._steps - self._step)
            if after_s <= still_s * (1.0 - LEAST_GAIN) and gained_s >= WORTH * moved.seconds:
                return moved
        self._refused = paces
        return None

    def _paces(self, seconds: Sequence[float]) -> list[Pace]:
        """Of who has no samples that of the plan, as far as the others keep to it."""
        factors = self._factors(seconds)
        usual = _median(factors.values())
        paces = [pace.times(factors.get(team, usual)) for team, pace in enumerate(self._planned)]
        reads = [host if n else "" for host, n in zip(self._hosts, self.samples)]
        return with_data(paces, reads, self._read_per_s)

    def _factors(self, seconds: Sequence[float]) -> dict[int, float]:
        """How many times as long as planned each team takes that has samples."""
        every = enumerate(zip(self._planned, self.samples, seconds))
        return {team: s / planned.seconds(n) for team, (planned, n, s) in every if n}

    def _gains(self, change: Change, seconds: Sequence[float]) -> bool:
        """Whether the change would have been right in one step."""
        after_s, before_s = self._take_s(seconds, change.samples, self.samples)
        return after_s <= before_s * (1.0 - LEAST_GAIN_EACH)

    def _take_s(self, seconds: Sequence[float], *splits: Sequence[int]) -> list[float]:
        """What a step takes by each of these splits, if devices take so long now."""
        paces = self._paces(seconds)
        return [slowest_s(paces, samples) for samples in splits]

    def _why(self, seconds: list[float]) -> str:
        """The device that differs most from the others, against the plan."""
        factors = self._factors(seconds)
        usual = _median(factors.values())
        team = max(factors, key=lambda n: max(factors[n] / usual, usual / factors[n]))
        factor = factors[team] / usual
        times = f"{factor:.2f} times as long as" if factor >= 1 else f"{factor:.2f} of the time of"
        return f"device '{self._devices[team]}' takes {times} the others, against the plan"


def _median(factors: Collection[float]) -> float:
    """The upper one of two."""
    return sorted(factors)[len(factors) // 2]


def _alike(one: Pace, other: Pace) -> bool:
    return abs(one.sample_s - other.sample_s) <= LEAST_GAIN_EACH * other.sample_s
