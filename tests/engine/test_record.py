"""What a rank notes of a step: every moment of it, and every collective of units."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpumix.engine.record import SILENT, Recorder
from harness import run_ranks
from models import ARCHITECTURES
from reference import Share, batches, engine_alone, engine_for, own_rows

GPT2 = ARCHITECTURES["gpt2"]
UNITS = [f"transformer.h.{i}" for i in range(3)]
ROOT = "(root)"
GATHERS = [("gather", unit) for unit in (ROOT, *UNITS)]
# A rank that only stores, one that only computes, and one that does both.
SHARES = [Share(0, 0, 2), Share(3, 2, 0), Share(4, 1, 1)]


def recorded(engine, worker, batch):
    """The recording of a step, and the seconds that the communicator's own clock counted."""
    engine.comm.record = recorder = Recorder(engine.comm, worker)
    recorder.begin()
    before = engine.comm.clock.total_s()
    engine.step(batch)
    waited_s = engine.comm.clock.total_s() - before
    recorder.computes("optimizer", ROOT)
    recorder.end()
    return recorder.recording(), waited_s


def _on_rank():
    engine = engine_for(GPT2.factory, SHARES)
    rank = engine.comm.rank
    batch = own_rows(next(batches(GPT2, 7, 1)), SHARES, rank)
    return recorded(engine, engine.plan.workers[rank], batch)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(_on_rank, 3)


def test_every_moment_is_noted(ranks):
    for recording, _ in ranks:
        activities = recording.activities
        assert activities[0].start_s == 0
        assert all(one.end_s == other.start_s for one, other in pairwise(activities))
        assert all(activity.start_s <= activity.end_s for activity in activities)


def test_computing_is_noted_by_pass_and_unit(ranks):
    passes = [
        *(("forward", unit) for unit in (ROOT, *UNITS)),
        ("head", ROOT),
        *(("backward", unit) for unit in reversed(UNITS)),
    ]
    storing, computing, both = (
        [(s.kind, s.unit) for s in recording.activities if s.kind not in ("waiting", "overhead")]
        for recording, _ in ranks
    )
    assert storing == [("optimizer", ROOT)]
    assert computing == passes
    assert both == [*passes, ("optimizer", ROOT)]


def test_all_ranks_note_the_same_collectives(ranks):
    last, middle, first = reversed(UNITS)
    for recording, _ in ranks:
        assert [(move.kind, move.unit) for move in recording.moves] == [
            *GATHERS, ("regather", middle), ("reduce", last),
            ("regather", first), ("reduce", middle), ("reduce", first), ("reduce", ROOT),
        ]  # fmt: skip


def test_a_collective_ends_before_its_wait_does_and_after_it_was_issued(ranks):
    for recording, _ in ranks:
        for move in recording.moves:
            assert move.issued_s <= move.ended_s
        for activity in recording.activities:
            if activity.kind == "waiting":
                move = recording.moves[activity.move]
                assert (move.unit, move.issued_s <= activity.start_s) == (activity.unit, True)


def test_waits_are_those_that_the_communicator_counts(ranks):
    """And what follows at once: a reduction's sum over ranks."""
    for recording, counted_s in ranks:
        waited = [s.end_s - s.start_s for s in recording.activities if s.kind == "waiting"]
        assert 0 < counted_s <= sum(waited)


def test_a_rank_alone_waits_for_nothing():
    engine = engine_alone(GPT2.factory, 2, 1)
    recording, _ = recorded(engine, engine.plan.workers[0], next(batches(GPT2, 2, 1)))
    assert recording.moves == ()
    assert "waiting" not in {activity.kind for activity in recording.activities}


def test_steps_are_not_recorded_by_default():
    engine = engine_alone(GPT2.factory, 2, 1)
    engine.step(next(batches(GPT2, 2, 1)))
    assert engine.comm.record is SILENT
