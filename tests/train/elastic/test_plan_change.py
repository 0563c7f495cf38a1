"""What a run's record tells of another plan: what each device had, and has."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.plan.plan import Plan
from gpumix.schema.reading.read import read_job
from gpumix.train.elastic.device_pace import with_samples
from gpumix.train.elastic.plan_change import (
    PlanParts,
    apply_split,
    describe_changes,
    diff_plan_parts,
    load_parts_in_force,
    make_rebalance_event,
    make_start_event,
)
from gpumix.train.elastic.rebalance_memory import with_shares
from gpumix.train.rank_setup.context import Task
from gpumix.train.run_figures.writer import RunLog
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import StepRecord
from gpumix.train.run_log.run_id import assign_run_id
from gpumix.train.run_manifest import RunRecord
from helpers.runs.jobs import CLUSTER, plan_for, write_job

STEP = StepRecord(1, 2.0, 1e-3, 0.7, 0.5, 100.0, 50)


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    """Of `big-0`, `small-0` and `small-1`."""
    return plan_for(write_job(tmp_path_factory.mktemp("job"), global_batch_size=16), (6, 6, 4))


def other(plan: Plan) -> Plan:
    return with_shares(with_samples(plan, (8, 6, 2)), (0.25, 0.5, 0.25))


def test_the_same_plan_changes_nothing(plan):
    assert diff_plan_parts(PlanParts.of(plan), PlanParts.of(plan)) == {}
    assert make_start_event(PlanParts.of(plan), PlanParts.of(plan), "starting again") is None
    predicted_anew = plan.model_copy(update={"prediction": None, "reasons": None})
    assert (
        make_start_event(PlanParts.of(plan), PlanParts.of(predicted_anew), "starting again") is None
    )


def test_other_devices_of_the_same_names_are_told(plan, tmp_path):
    """The job of the last start says what they were; of one that is gone its samples tell."""
    slowed = {"big": "50 GFLOP/s", "small": "25 GFLOP/s"}
    emulated = [one | {"emulate": slowed[one["class"]]} for one in CLUSTER]
    job = read_job(write_job(tmp_path, cluster=emulated))
    assert isinstance(job.cluster, Cluster)
    now = PlanParts.of(plan, job.cluster)
    before = replace(now, devices={"big-0": "emulated, 90 GFLOP/s", "gone": "cpu"})
    told = make_start_event(before, now, "the run was resumed")
    assert told is not None and told.fields["live"] is False
    assert (
        describe_changes(told.fields)
        == "devices: big-0 emulated, 90 GFLOP/s to emulated, 50 GFLOP/s"
    )
    assert make_start_event(PlanParts.of(plan), now, "nobody knows") is None
    plan.save(tmp_path / run_files.PLAN)
    assert load_parts_in_force(tmp_path) == PlanParts.of(plan)
    RunRecord.of(Task(job, job.cluster, tmp_path)).save(tmp_path / run_files.RUN)
    assert load_parts_in_force(tmp_path) == now


def test_samples_and_shares_are_told_before_and_after(plan):
    told = make_start_event(PlanParts.of(plan), PlanParts.of(other(plan)), "by the times of now")
    assert told is not None
    assert (told.event, told.fields["why"], told.fields["live"]) == (
        "plan",
        "by the times of now",
        False,
    )
    names = ("big-0", "small-0", "small-1")
    assert told.fields["samples_before"] == dict(zip(names, (6, 6, 4)))
    assert told.fields["samples"] == dict(zip(names, (8, 6, 2)))
    assert told.fields["shares_before"] == {w.device: w.state_share for w in plan.workers}
    assert told.fields["shares"] == dict(zip(names, (0.25, 0.5, 0.25)))
    assert "modes" not in told.fields  # stays


def test_what_else_differs_is_told_too(plan):
    (stage,) = plan.stages
    workers = [w.model_copy(update={"micro_batch": 1}) for w in stage.workers]
    smaller = plan.model_copy(
        update={
            "strategy": "mine",
            "stages": (stage.model_copy(update={"workers": tuple(workers)}),),
        }
    )
    fields = diff_plan_parts(PlanParts.of(plan), PlanParts.of(smaller))
    assert (fields["strategy_before"], fields["strategy"]) == (plan.strategy, "mine")
    assert set(fields["micro_batches"].values()) == {1}
    assert fields["samples"] == fields["samples_before"]
    assert describe_changes(fields).startswith(
        f"strategy {plan.strategy} to mine; largest micro-batches: "
    )


def test_words_tell_of_those_whose_part_has_changed(plan):
    fields = diff_plan_parts(PlanParts.of(plan), PlanParts.of(other(plan)))
    first, second = describe_changes(fields).split("; ")[:2]
    assert first == "samples: big-0 6 to 8, small-1 4 to 2"
    assert second.startswith("of the state: big-0 ")


def test_a_split_anew_is_told_in_a_line(plan):
    even = with_shares(plan, (0.5, 0.25, 0.25))
    why = "device 'small-1' takes 2.00 times as long"
    told = make_rebalance_event(
        even, other(plan), why, what="a step", before_s=0.4, after_s=0.3, moving_s=0.1
    )
    assert told.text == (
        f"split anew, for {why}: samples: big-0 6 to 8, small-1 4 to 2; of the state: big-0 50.0% "
        "to 25.0%, small-0 25.0% to 50.0%; largest micro-batches: small-1 4 to 2; a step is to "
        "take 300 ms instead of 400 ms"
    )
    assert told.event == "plan"
    assert told.fields["live"] is True
    expected = {"expected_s": 0.3, "expected_before_s": 0.4, "moving_s": 0.1, "why": why}
    assert {name: told.fields[name] for name in expected} == expected


def test_words_of_very_many_name_some():
    before = {f"gpu-{n}": 1 for n in range(1000)}
    told = describe_changes({"samples_before": before, "samples": dict.fromkeys(before, 2)})
    assert told.endswith("gpu-5 1 to 2 and 994 more")


@pytest.mark.parametrize(
    "told", [{}, {"samples": 3}, {"samples": {"a": 1}}, {"samples": [], "samples_before": {}}]
)
def test_words_of_what_is_no_such_event_are_few(told):
    assert describe_changes(told) == ""


def test_an_event_makes_the_plan_that_it_tells_of(plan):
    after = other(plan)
    assert PlanParts.of(
        apply_split(plan, diff_plan_parts(PlanParts.of(plan), PlanParts.of(after)))
    ) == PlanParts.of(after)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"samples": {"big-0": 16}, "shares": {"big-0": 1.0}},
        {"samples": {"big-0": 1, "small-0": 1, "small-1": 1}, "shares": {}},
        {"samples": {"big-0": "x", "small-0": 1, "small-1": 1}, "shares": 3},
    ],
)
def test_an_event_of_another_plan_makes_none(plan, told):
    assert apply_split(plan, told) == plan


def test_what_is_in_force_is_the_plan_as_it_was_split_last(plan, tmp_path):
    assert load_parts_in_force(tmp_path) is None
    plan.save(tmp_path / run_files.PLAN)
    assert load_parts_in_force(tmp_path) == PlanParts.of(plan)
    told = make_start_event(PlanParts.of(plan), PlanParts.of(other(plan)), "")
    assert told is not None
    with RunLog(tmp_path, plan, 10) as log:
        log.step(STEP)
        log.tell(1, told)
    with (tmp_path / run_files.METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "plan", "step": 2})[:-3])  # cut short
    assert load_parts_in_force(tmp_path) == PlanParts.of(other(plan))


def test_what_an_earlier_run_left_is_not_in_force(plan, tmp_path):
    """Its plan is there until the one of a run begun anew is written, and its record still then."""
    plan.save(tmp_path / run_files.PLAN)
    told = make_start_event(PlanParts.of(plan), PlanParts.of(other(plan)), "")
    assert told is not None
    with RunLog(tmp_path, plan, 10) as log:
        log.step(STEP)
        log.tell(1, told)
    long_ago = 1e9
    for name in (run_files.PLAN, run_files.METRICS):
        os.utime(tmp_path / name, (long_ago, long_ago))
    assign_run_id(tmp_path, fresh=True)
    assert load_parts_in_force(tmp_path, fresh=True) is None
    plan.save(tmp_path / run_files.PLAN)
    assert load_parts_in_force(tmp_path, fresh=True) == PlanParts.of(plan)
    assert load_parts_in_force(tmp_path) == PlanParts.of(other(plan))  # of a run that is resumed


def test_a_plan_of_another_version_is_none(tmp_path):
    (tmp_path / run_files.PLAN).write_text('{"kind": "plan", "schema_version": 99}')
    assert load_parts_in_force(tmp_path) is None
