"""A plan that was edited, given to a run: refused before ranks start, or predicted again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpumix.schema.errors import InputError
from gpumix.schema.peak_flops import Peak
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.checks.user_plan import describe_speed_changes
from gpumix.train.controller import JobController, UserPlan
from helpers.errors import raises
from helpers.runs.jobs import CLUSTER, OWN_PROFILES, metrics, plan_for, toy, train, write_job

# Few plans are possible, so that one is soon made.
FEW = {
    "zero_stages": [1],
    "shardings": ["all"],
    "checkpoints_on": ["device"],
    "orders": ["layered"],
    "cross_entropy": ["whole"],
    "state_on": ["device"],
    "pipeline_schedules": ["1f1b"],
}
TWO = {
    "techniques": {"min_pipeline_stages": 2, "max_pipeline_stages": 2, "leave_out": False, **FEW}
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_job(tmp_path_factory.mktemp("given"), max_steps=2, model=toy(blocks=4), **TWO)


@pytest.fixture(scope="module")
def made(job) -> tuple[Plan, Profile]:
    pipeline = JobController.of_file(job, [], debug=True)
    profile = pipeline.profile()
    return pipeline.plan(profile), profile


def edited(plan: Plan, number: int, **changes: Any) -> Plan:
    tree = plan.model_dump(mode="json")
    tree["stages"][number] |= changes
    return Plan.model_validate(tree)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"root": []}, {"code": "stage-root-incomplete", "what": "root"}),
        ({"units": ["blocks.9"]}, {"code": "plan-unit-unknown", "what": "blocks.9"}),
    ],
)
def test_a_plan_that_is_not_the_models_is_refused_before_ranks_start(job, made, changes, told):
    with raises(InputError, **told):
        train(job, plan=edited(made[0], 1, **changes))
    assert not (job.parent / "run").exists()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "device_class",
            "small",
            {"code": "plan-of-other-devices", "what": ("big-0", "small", "big", "device_class")},
        ),
        (
            "host",
            "elsewhere",
            {"code": "plan-of-other-devices", "what": ("big-0", "elsewhere", "localhost")},
        ),
    ],
)
def test_devices_are_those_of_the_cluster(job, made, key, value, told):
    tree = made[0].model_dump(mode="json")
    for stage in tree["stages"]:
        for worker in stage["workers"]:
            if worker["device"] == "big-0":
                worker[key] = value
    with raises(InputError, **told):
        train(job, plan=Plan.model_validate(tree))


def test_a_plan_that_would_train_another_model_is_refused(job, made):
    rounded = made[0].model_copy(update={"communication_dtype": "bf16"})
    with raises(InputError, code="plan-communication-dtype", what=("communication_dtype", "bf16")):
        train(job, plan=rounded)


def test_a_plan_as_it_was_made_keeps_what_it_says(job, made):
    pipeline = JobController.of_file(job, [], debug=True)
    assert pipeline._checked(made[0], made[1]) == made


def test_an_edited_plan_is_predicted_again(job, made):
    plan, profile = made
    of_last = [w.model_dump(mode="json") for w in plan.stages[1].workers]
    flipped = {"recompute": not of_last[0]["mode"]["recompute"]}
    workers = [w | {"mode": w["mode"] | flipped, "kept_graphs": 0} for w in of_last]
    changed = edited(plan, 1, workers=workers)
    found, _ = JobController.of_file(job, [], debug=True)._checked(changed, profile)
    assert found.prediction is not None
    assert found.prediction != plan.prediction
    assert found.reasons is None


def test_a_profile_of_more_memory_is_held_to_what_there_is(tmp_path, made):
    """A plan that fits may still be split anew, within the memory of here."""
    plan, profile = made
    smaller = [CLUSTER[0] | {"memory": "48 MiB"}, CLUSTER[1]]
    job = write_job(tmp_path, model=toy(blocks=4), cluster=smaller, **OWN_PROFILES, **TWO)
    found, known = JobController.of_file(job, [], debug=True)._checked(plan, profile)
    assert known is not None and found.prediction is not None
    assert known.cluster.class_named("big").memory_bytes == 48 * 2**20
    assert known.cluster.class_named("small") == profile.cluster.class_named("small")
    limits = {w.device: w.memory_limit_bytes for w in found.prediction.workers}
    assert limits["big-0"] < 48 * 2**20 and found.stages == plan.stages


def test_a_plan_for_faster_devices_of_the_same_names_is_told_of(tmp_path, made, capsys):
    """The profile beside it is theirs, and nothing was measured here."""
    plan, profile = made
    assert plan.prediction is not None and describe_speed_changes(plan, profile.cluster) == []
    peaks = {"big": Peak(flops_per_s=5e10, source="emulated")}
    peaks["small"] = Peak(flops_per_s=1e9, source="measured")  # another time another rate
    prediction = plan.prediction.model_copy(update={"peaks": peaks})
    plan = plan.model_copy(update={"prediction": prediction})
    slower = [one | {"emulate": "25 GFLOP/s"} for one in CLUSTER]
    job = write_job(
        tmp_path, max_steps=1, model=toy(blocks=4), cluster=slower, **OWN_PROFILES, **TWO
    )
    pipeline = JobController.of_file(job, [], debug=False)
    pipeline.train(UserPlan(plan, profile), resume=False)
    told = " ".join(capsys.readouterr().err.split())
    assert "class 'big' computed 50 GFLOP/s, here it computes 25 GFLOP/s. Another one may" in told
    assert "class 'small' computed" not in told
    trained = Plan.load(tmp_path / "run" / "plan.json")
    assert trained.prediction is None and trained.stages == plan.stages
    assert not (tmp_path / "run" / "profile.json").exists()


def test_what_a_job_does_not_say_is_not_said_to_have_no_effect(tmp_path, made, capsys):
    other = made[0].model_copy(update={"strategy": "by hand"})
    train(write_job(tmp_path, max_steps=1, model=toy(blocks=4), techniques=None), plan=other)
    told = capsys.readouterr().err
    assert "`strategy:" not in told and "`techniques` have" not in told


def test_what_the_job_says_of_plans_and_a_given_one_does_not_follow_is_told(tmp_path, made, capsys):
    other = 0 if made[0].zero_stage else 3
    said = {"strategy": "even", "techniques": {"zero_stages": [other], "max_pipeline_stages": 1}}
    job = write_job(tmp_path, max_steps=1, model=toy(blocks=4), **said)
    train(job, plan=made[0])
    told = capsys.readouterr().err
    assert "`strategy: even` has no effect" in told
    assert "`techniques` have no effect: the plan that was given uses ZeRO stage" in told
    assert len(metrics(job.parent / "run")) == 1


def test_waves_train_what_one_wave_trains(tmp_path):
    losses = {}
    for waves in (1, 3):
        folder = tmp_path / str(waves)
        folder.mkdir()
        job = write_job(folder, max_steps=3, trace_step=2)
        whole = plan_for(job, samples=(5, 2, 1))
        [stage] = whole.stages
        cut = [worker.model_copy(update={"micro_batch": 1}) for worker in stage.workers]
        plan = edited(whole.model_copy(update={"waves": waves}), 0, workers=_dumped(cut))
        train(job, plan=plan)
        losses[waves] = [record["loss"] for record in metrics(folder / "run")]
    trace = json.loads((tmp_path / "3" / "run" / "trace.json").read_text())
    passes = [e for e in trace["traceEvents"] if e["name"] == "forward blocks.0"]
    cut = [tuple(one["args"]["micro_batches"]) for one in passes]
    # By rank of 5, 2 and 1 samples, in each wave.
    assert sorted(cut) == sorted([(1,), (1, 1), (1, 1), (), (1,), (1,), (), (), (1,)])
    assert losses[3] == pytest.approx(losses[1], rel=1e-6)


def _dumped(workers):
    return [worker.model_dump(mode="json") for worker in workers]
