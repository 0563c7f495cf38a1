"""What a rank notes of a step: every moment of it, and every collective of units."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import pytest

from gpumix.cost.pipeline_schedule import MicroBatchSchedule
from gpumix.engine.comm.step_recorder import SILENT, Recorder
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import Share, batches, engine_alone, engine_for, own_rows
from helpers.training.staging import Row, own_samples, rows, staged_engine, staged_plan

GPT2 = ARCHITECTURES["gpt2"]
UNITS = [f"transformer.h.{i}" for i in range(3)]
ROOT = "(root)"
GATHERS = [("gather", unit) for unit in (ROOT, *UNITS)]
# A rank that only stores, and one that does both.
SHARES = [Share(0, 0, 2), Share(4, 1, 1)]


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
    batch = own_rows(next(batches(GPT2, 4, 1)), SHARES, rank)
    return recorded(engine, engine.plan.workers[rank], batch)


WAITS = ("waiting", "slower rank")
BESIDE = (*WAITS, "overhead")


@pytest.fixture(scope="module")
def both(request):
    """What both ranks record, which are started once; some tests look at two of the plans."""
    wanted = {"1f1b", "tp_group", *chosen(request, STAGED, by="name")}
    plans = {name: plan_of(name).model_dump_json() for name in sorted(wanted)}
    return run_ranks(_each_on_rank, 2, plans, timeout_s=120)


def _each_on_rank(plans: dict[str, str]):
    return _on_rank(), _staged_on_rank(plans)


@pytest.fixture(scope="module")
def ranks(both):
    return [of_rank for of_rank, _ in both]


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
    storing, computing = (
        [(s.kind, s.unit) for s in recording.activities if s.kind not in BESIDE]
        for recording, _ in ranks
    )
    assert storing == [("optimizer", ROOT)]
    assert computing == [*passes, ("optimizer", ROOT)]


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
        waited = [s.end_s - s.start_s for s in recording.activities if s.kind in WAITS]
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


# -- several stages, and tensor-parallel groups ----------------------------------------------------

HALVES = rows([6], [6])
STAGED: dict[str, tuple[str, list[Row], dict[str, Any]]] = {
    "gpipe": ("gpt2", HALVES, {"schedule": "gpipe", "zero_stage": 1}),
    "1f1b": ("gpt2", HALVES, {"cuts": [1], "zero_stage": 0}),
    "zero-bubble": (
        "gpt2",
        rows([6], [6], mode=Mode(recompute=False)),
        {"schedule": "zero-bubble", "zero_stage": 1},
    ),
    "interleaved": ("t5", HALVES * 2, {"schedule": "interleaved", "zero_stage": 1}),
    "waves": ("gpt2", HALVES, {"waves": 3, "zero_stage": 3}),
    "tp_group": ("gpt2", rows([6], tensor=[2]), {"zero_stage": 1}),
}


def plan_of(name: str) -> Plan:
    model, layout, settings = STAGED[name]
    return staged_plan(model, layout, **settings)


def _staged_on_rank(plans: dict[str, str]):
    found = {}
    for name, text in plans.items():
        plan, (model, *_) = Plan.model_validate_json(text), STAGED[name]
        engine = staged_engine(model, plan)
        rank = engine.comm.rank
        batch = own_samples(plan, rank, next(batches(ARCHITECTURES[model], 6, 1)))
        found[name], _ = recorded(engine, plan.workers[rank], batch)
    return found


@pytest.fixture(scope="module")
def in_stages(both):
    """By plan, the recordings of its ranks."""
    found = [by_plan for _, by_plan in both]
    return {name: [by_plan[name] for by_plan in found] for name in found[0]}


IN_STAGES = [name for name in STAGED if name != "tp_group"]
some = pytest.mark.parametrize("name", left_out(IN_STAGES, {*IN_STAGES} - {"1f1b"}))


@some
def test_in_stages_it_is_noted_by_pass_and_micro_batch_as_scheduled(in_stages, name):
    plan = plan_of(name)
    for rank, recording in enumerate(in_stages[name]):
        noted = [(s.kind, s.unit, s.batch) for s in recording.activities if s.batch is not None]
        wanted = [
            (action.kind, f"stage {action.stage + 1}", action.batch)
            for action in MicroBatchSchedule.of(plan).actions_of(plan, rank)
        ]
        assert [one for one, _ in groupby(noted)] == wanted


@some
def test_both_ends_of_a_message_know_it_by_one_name(in_stages, name):
    first, second = (
        {kind: [m.name for m in recording.moves if m.kind == kind] for kind in ("send", "receive")}
        for recording in in_stages[name]
    )
    assert len(first["send"]) == len(set(first["send"])) > 0
    assert sorted(first["send"]) == sorted(second["receive"])
    assert sorted(first["receive"]) == sorted(second["send"])


def test_waits_for_messages_are_noted(in_stages):
    for recording in in_stages["1f1b"]:
        waited = [s.move for s in recording.activities if s.kind == "waiting"]
        assert "receive" in {recording.moves[move].kind for move in waited}


def test_a_tp_group_notes_its_sums_between_what_it_computes(in_stages):
    """Two forward and, as blocks are computed again, four backward in each of three blocks."""
    for recording in in_stages["tp_group"]:
        kinds = [activity.kind for activity in recording.activities]
        assert kinds.count("tensor parallel") >= 3 * 6
        place = kinds.index("tensor parallel")
        assert kinds[place - 1 : place + 2] == ["forward", "tensor parallel", "forward"]
