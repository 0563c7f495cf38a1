"""Trace of an executed step, in the format of `gpumix simulate`.

Every rank records its own part. Only all parts together show when a collective or a message began
to run, and so for whom a rank waited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

from gpumix.engine.comm.step_recorder import Activity, RecordedMove, RecordedStep
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Worker
from gpumix.schema.plan.step_trace import (
    Cause,
    Span,
    Trace,
    format_process_name,
    get_wait_cause,
    make_wait_span,
    make_work_span,
)
from gpumix.schema.profile.profile import ROOT


def build_trace(plan: Plan, recordings: Sequence[RecordedStep]) -> Trace:
    """Build the trace of a step from the recordings of all ranks, in rank order."""
    keys = [tuple(_key_collectives(recording.moves)) for recording in recordings]
    begun_s: dict[_Key, float] = {}
    for key, move in zip(chain(*keys), chain(*(recording.moves for recording in recordings))):
        begun_s[key] = max(move.issued_s, begun_s.get(key, 0.0))
    ranks = (
        _RankActivities(plan, worker, recording, tuple(begun_s[key] for key in own))
        for worker, recording, own in zip(plan.workers, recordings, keys)
    )
    return Trace.of(chain.from_iterable(rank.spans() for rank in ranks))


_Key = tuple[str, int]


def _key_collectives(moves: Sequence[RecordedMove]) -> Iterator[_Key]:
    """Yield a key per collective, equal on all participants: the name, and the count of earlier
    uses."""
    before: Counter[str] = Counter()
    for move in moves:
        yield move.name, before[move.name]
        before[move.name] += 1


@dataclass(frozen=True)
class _RankActivities:
    """Activities of a rank. `begun_s` is when the last participant had issued each collective."""

    plan: Plan
    worker: Worker
    recording: RecordedStep
    begun_s: tuple[float, ...]

    def spans(self) -> Iterator[Span]:
        worker = self.worker
        seen: Counter[tuple[str, str]] = Counter()
        process = format_process_name(worker, emulated=self.plan.emulated)
        for done in self.recording.activities:
            if done.kind == "waiting":
                for cause, start_s, end_s in self._split_wait(done):
                    yield make_wait_span(cause, process=process, start_s=start_s, end_s=end_s)
                continue
            if (
                done.kind == "overhead"
                or done.kind == "tensor parallel"
                or done.kind == "other stage"
                or done.kind == "slower rank"
            ):
                span = make_wait_span(
                    done.kind, process=process, start_s=done.start_s, end_s=done.end_s
                )
                yield span
                continue
            yield make_work_span(
                done.kind,
                done.unit,
                process=process,
                start_s=done.start_s,
                end_s=done.end_s,
                micro_batches=self._batches(done, seen[done.kind, done.unit]),
            )
            seen[done.kind, done.unit] += 1
        yield from self._moves(process)

    def _batches(self, done: Activity, before: int) -> tuple[int, ...]:
        """Return the samples in each micro-batch of an activity.

        Args:
            before: earlier activities of its kind and unit, also of earlier waves.
        """
        if done.batch is not None:
            return (done.batch,)
        if done.kind == "optimizer":
            return ()
        a_wave = max(1, self.plan.stages[0].units.count(done.unit))
        waves = self.worker.divide_micro_batches(self.plan.waves)
        return waves[before // a_wave % self.plan.waves]

    def _split_wait(self, waited: Activity) -> Iterator[tuple[Cause, float, float]]:
        """Split a wait: for the last rank to issue the collective, then for the collective."""
        move = self.recording.moves[waited.move]
        begun_s = min(max(self.begun_s[waited.move], waited.start_s), waited.end_s)
        message = move.kind == "receive"
        if begun_s > waited.start_s:
            yield "other stage" if message else "slower rank", waited.start_s, begun_s
        yield "message" if message else self._cause(move), begun_s, waited.end_s

    def _cause(self, move: RecordedMove) -> Cause:
        """Return the cause of a wait for a collective. With several stages, others compute during
        the first and last collectives too."""
        assert move.kind != "receive", "that is a message"
        first = self.plan.stages[0].units[0]
        ends = move.unit == ROOT or (move.kind == "reduce" and move.unit == first)
        return get_wait_cause(move.kind, exposed=ends and len(self.plan.stages) == 1)

    def _moves(self, process: str) -> Iterator[Span]:
        """Yield spans of collectives, and of messages at the sender. Concurrent transfers follow
        each other, as on a wire. No span begins after its local end, whatever another rank says,
        whose clock may have started earlier."""
        end_s = 0.0
        for begun_s, move in sorted(zip(self.begun_s, self.recording.moves), key=itemgetter(0)):
            if move.kind == "receive":
                continue
            start_s = max(end_s, min(begun_s, move.ended_s))
            end_s = max(start_s, move.ended_s)
            batches = () if move.batch is None else (move.batch,)
            yield make_work_span(
                move.kind,
                move.unit,
                process=process,
                start_s=start_s,
                end_s=end_s,
                micro_batches=batches,
            )
