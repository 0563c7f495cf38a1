"""The trace of a step that was run, in the shape of those that `gpumix simulate` writes.

Every rank records its own part; only all parts together say when a collective began to run, and so
for whom a rank waited.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from gpumix.engine.record import Activity, Moved, Recording
from gpumix.spec.plan import Plan, Worker
from gpumix.spec.profile import ROOT
from gpumix.spec.trace import Cause, Span, Trace, cause_of, event, process_of, wait


def trace_of(plan: Plan, recordings: Sequence[Recording]) -> Trace:
    """One step by the recordings of all ranks, in rank order."""
    of_all = zip(*(recording.moves for recording in recordings), strict=True)
    begun_s = tuple(max(move.issued_s for move in same) for same in of_all)
    ranks = (_Rank(plan, *of_rank, begun_s) for of_rank in zip(plan.workers, recordings))
    return Trace.of(chain.from_iterable(rank.spans() for rank in ranks))


@dataclass(frozen=True)
class _Rank:
    """What one rank did. `begun_s` is when the last rank had issued each collective."""

    plan: Plan
    worker: Worker
    recording: Recording
    begun_s: tuple[float, ...]

    def spans(self) -> Iterator[Span]:
        worker = self.worker
        process = process_of(worker, emulated=self.plan.emulated)
        for done in self.recording.activities:
            if done.kind == "waiting" or done.kind == "overhead":
                for cause, start_s, end_s in self._causes(done):
                    yield wait(cause, process=process, start_s=start_s, end_s=end_s)
                continue
            yield event(
                done.kind,
                done.unit,
                process=process,
                start_s=done.start_s,
                end_s=done.end_s,
                micro_batches=() if done.kind == "optimizer" else worker.micro_batches,
            )
        for move, start_s, end_s in self._moves():
            yield event(move.kind, move.unit, process=process, start_s=start_s, end_s=end_s)

    def _causes(self, waited: Activity) -> Iterator[tuple[Cause, float, float]]:
        """What a rank waits for: first for the last rank to issue the collective, then for it."""
        if waited.kind == "overhead":
            yield "overhead", waited.start_s, waited.end_s
            return
        move = self.recording.moves[waited.move]
        first = self.plan.stages[0].units[0]
        exposed = move.unit == ROOT or (move.kind == "reduce" and move.unit == first)
        begun_s = min(max(self.begun_s[waited.move], waited.start_s), waited.end_s)
        if begun_s > waited.start_s:
            yield "slower rank", waited.start_s, begun_s
        yield cause_of(move.kind, exposed=exposed), begun_s, waited.end_s

    def _moves(self) -> Iterator[tuple[Moved, float, float]]:
        """Collectives with their start and end. What is under way at the same time is shown one
        after the other, as it is on a wire."""
        end_s = 0.0
        for move, begun_s in zip(self.recording.moves, self.begun_s):
            start_s = max(end_s, begun_s)
            end_s = max(start_s, move.ended_s)
            yield move, start_s, end_s
