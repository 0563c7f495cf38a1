"""Waiting times of ranks in a single stage: each moment without computation has one cause."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile

from gpumix.schema.plan.step_trace import get_wait_cause
from gpumix.simulate.program import StepProgram
from gpumix.simulate.replay import COMPUTE_KINDS, Event, Idle

Span = tuple[float, float]


def iterate_idle_intervals(
    program: StepProgram, events: Sequence[Event], moved: Sequence[Span]
) -> Iterator[Idle]:
    """Yield all intervals in which a lane's ranks compute nothing, ordered by lane and time.

    Args:
        moved: start and end of each collective.
    """
    own: list[list[Event]] = [[] for _ in program.lanes]
    for event in events:
        if event.lane is not None:
            own[event.lane].append(event)
    step_s = max((event.end for event in events), default=0.0)
    for number, of_lane in enumerate(own):
        yield from _LaneWaits(program, moved, number, of_lane, step_s).all()


class _LaneWaits:
    """Waiting times of one lane's ranks."""

    def __init__(
        self,
        program: StepProgram,
        moved: Sequence[Span],
        number: int,
        own: list[Event],
        step_s: float,
    ) -> None:
        self._program, self._number, self._step_s = program, number, step_s
        self._spans = moved
        self._computed = [event for event in own if event.kind in COMPUTE_KINDS]
        self._copies = [event for event in own if event.kind not in COMPUTE_KINDS]
        self._moved = [
            (*span, collective)
            for span, collective in zip(moved, program.collectives)
            if span[0] < span[1]
        ]
        self._ends = [end for _, end, _ in self._moved]

    def all(self) -> Iterator[Idle]:
        """Yield idle intervals from the start of the step to its end."""
        moved, at = self._spans, self._program.overhead_s
        if at > 0:
            yield Idle(self._number, 0.0, at, "overhead")
        tasks = self._program.lanes[self._number].tasks
        computed = [task for task in tasks if task.seconds > 0]
        for task, event in zip(computed, self._computed, strict=True):
            needed_until = moved[task.needs - 1][1] if task.needs else at
            yield from self._split_interval(at, event.start, needed_until)
            at = event.end
        needed_until = moved[-1][1] if moved else at
        yield from self._split_interval(at, self._step_s, needed_until)

    def _split_interval(self, start: float, end: float, needed_until: float) -> Iterator[Idle]:
        """Split an interval without computation where its cause may change. The lane waits for
        collectives until `needed_until`."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        moved = list(takewhile(lambda span: span[0] < end, self._moved[first:]))
        copies = [e for e in self._copies if e.end > start and e.start < end]
        borders = {start, end, needed_until}
        borders |= {time for begun, ended, _ in moved for time in (begun, ended)}
        borders |= {time for copy in copies for time in (copy.start, copy.end)}
        for a, b in pairwise(sorted(time for time in borders if start <= time <= end)):
            running = next((c for begun, ended, c in moved if begun <= a < ended), None)
            if running is not None and a < needed_until:
                cause = get_wait_cause(running.kind, exposed=running.exposed)
                yield Idle(self._number, a, b, cause)
            elif any(copy.start <= a < copy.end for copy in copies):
                yield Idle(self._number, a, b, "host copies")
            else:
                yield Idle(self._number, a, b, "slower rank")
