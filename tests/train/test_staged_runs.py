"""A run by a plan of several stages: trained, evaluated, saved, gone on with by another plan."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest

from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.step_trace import Trace
from gpumix.simulate.events import simulate
from gpumix.simulate.trace import build_trace
from gpumix.train.controller import JobController
from helpers.errors import raises
from helpers.extended import every_second, every_third
from helpers.runs.jobs import (
    BATCH,
    CLUSTER,
    OWN_PROFILES,
    PAIR,
    TENSOR_PLAN,
    metrics,
    plan_for,
    plan_of_mixed_degrees,
    staged_plan_for,
    toy,
    train,
    write_job,
)
from helpers.runs.traces import slices, told


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    return write_job(
        folder,
        max_steps=6,
        lr_scheduler={"type": "constant"},
        eval_steps=3,
        eval_batches=1,
        save_steps=3,
        save_total_limit=3,
    )


@pytest.fixture(scope="module")
def alone(job):
    """By one stage."""
    summary = train(job, f"output_dir={job.parent / 'alone'}", plan=plan_for(job))
    return summary.losses, evaluations(job.parent / "alone")


def staged(job, *, zero_stage: int) -> Plan:
    """The first device alone, then the others."""
    return staged_plan_for(job, [(BATCH,), (BATCH // 2,) * 2], zero_stage=zero_stage)


def evaluations(folder) -> list[float]:
    return [record["loss"] for record in metrics(folder, "evaluation")]


@pytest.mark.parametrize("zero_stage", every_third([0, 1, 3]))
def test_a_run_in_stages_is_that_of_one(job, alone, zero_stage):
    folder = job.parent / f"stages-{zero_stage}"
    plan = staged(job, zero_stage=zero_stage)
    found = train(job, f"output_dir={folder}", "advanced.trace_step=4", plan=plan)
    assert found.losses == pytest.approx(alone[0], rel=1e-5)
    assert evaluations(folder) == pytest.approx(alone[1], rel=1e-5)
    check_trace(job, plan, Trace.load(folder / "trace.json"))


def check_trace(job, plan: Plan, measured: Trace) -> None:
    """Passes and messages are those of the simulated step; a device computes, or it waits."""
    profile = JobController.of_file(job, [], debug=False).profile()
    found, expected = slices(measured), slices(build_trace(simulate(profile, plan), plan))
    assert list(found) == list(expected)
    for process, threads in found.items():
        # Waits cut passes, where a device waits for what it has not expected early enough.
        passes = [one for one, _ in groupby(told(threads["compute"]))]
        assert passes == told(expected[process]["compute"])
        if not plan.in_waves:
            assert sent(threads) == sent(expected[process])
        spans = sorted(threads["compute"] + threads["waiting"], key=lambda e: (e["ts"], e["dur"]))
        assert all(one["ts"] + one["dur"] == other["ts"] for one, other in pairwise(spans))


def sent(threads) -> list:
    return sorted(one for one in told(threads.get("communication", [])) if one[1] == "send")


def test_a_trial_tells_how_much_of_its_time_each_rank_waited(job):
    trial = JobController.of_file(job, [], debug=True).try_out(staged(job, zero_stage=0), 2)
    assert len(trial.busy_shares) == 3
    # The second stage begins when the first has sent, which goes on when the second has answered.
    assert all(0.0 < share < 1.0 for share in trial.busy_shares)


def test_a_run_in_stages_goes_on_without(job, alone):
    there = f"output_dir={job.parent / 'there'}"
    train(job, there, "max_steps=3", plan=staged(job, zero_stage=1))
    train(job, there, plan=plan_for(job), resume=True)
    seen = [record["loss"] for record in metrics(job.parent / "there")]
    assert seen == pytest.approx(alone[0], rel=1e-5)


@pytest.mark.slow
def test_a_run_in_a_tp_group_is_that_of_one(tmp_path):
    model = toy() | {"tensor_plan": TENSOR_PLAN}
    settings = {"model": model, "cluster": PAIR, "lr_scheduler": {"type": "constant"}}
    job = write_job(tmp_path, eval_steps=3, eval_batches=1, **settings)
    alone = train(job, f"output_dir={tmp_path / 'alone'}", plan=plan_for(job, (4, 4), (0.5, 0.5)))
    tp_group = f"output_dir={tmp_path / 'tp_group'}"
    found = train(
        job, tp_group, "techniques.tensor_parallel_size=2", "techniques.sequence_parallel=true"
    )
    plan = Plan.load(tmp_path / "tp_group" / "plan.json")
    assert [(stage.tensor, stage.sequence) for stage in plan.stages] == [(2, True)]
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    assert evaluations(tmp_path / "tp_group") == pytest.approx(
        evaluations(tmp_path / "alone"), rel=1e-5
    )


@pytest.mark.extended
def test_a_run_in_tp_groups_of_unlike_sizes_is_that_of_one_and_goes_on_without(tmp_path):
    model = toy() | {"tensor_plan": TENSOR_PLAN}
    cluster = [CLUSTER[0], *PAIR]
    settings = {"model": model, "cluster": cluster, "lr_scheduler": {"type": "constant"}}
    job = write_job(tmp_path, eval_steps=3, eval_batches=1, **settings)
    alone = train(job, f"output_dir={tmp_path / 'alone'}")
    there, plan = f"output_dir={tmp_path / 'there'}", plan_of_mixed_degrees(job)
    train(job, there, "max_steps=3", plan=plan)
    train(job, there, resume=True)
    seen = [record["loss"] for record in metrics(tmp_path / "there")]
    assert seen == pytest.approx(alone.losses, rel=1e-5)
    assert evaluations(tmp_path / "there") == pytest.approx(
        evaluations(tmp_path / "alone"), rel=1e-5
    )


@pytest.mark.extended
def test_who_insists_has_a_tp_group_of_unlike_devices(tmp_path, capsys):
    model = toy() | {"tensor_plan": TENSOR_PLAN}
    alike = write_job(
        tmp_path / "alike", model=model, cluster=PAIR, techniques={"tensor_parallel_size": 2}
    )
    pipeline = JobController.of_file(alike, [], debug=True)
    made = pipeline.plan(pipeline.profile()).model_dump_json()
    for own, other in (("pair-0", "big"), ("pair-1", "small")):
        made = made.replace(f'"{own}"', f'"{other}-0"')
        made = made.replace('"device_class":"pair"', f'"device_class":"{other}"', 1)
    plan = Plan.model_validate_json(made)
    assert [w.device_class for w in plan.workers] == ["big", "small"]
    unlike = [CLUSTER[0], CLUSTER[1] | {"count": 1}]
    job = write_job(tmp_path / "unlike", model=model, cluster=unlike)
    alone = train(job, f"output_dir={tmp_path / 'alone'}")
    capsys.readouterr()
    assert train(job, plan=plan).losses == pytest.approx(alone.losses, rel=1e-5)
    told = capsys.readouterr().err
    assert "nothing is known of how fast the plan is and whether it fits: a tensor-par" in told


def test_a_model_that_nobody_says_how_to_divide_is_refused(tmp_path):
    job = write_job(tmp_path, **OWN_PROFILES, cluster=PAIR)
    with raises(InputError, code="tensor-plan-missing"):
        train(job, "techniques.tensor_parallel_size=2")


def test_devices_that_a_plan_leaves_out_are_not_started(tmp_path):
    job = write_job(tmp_path, max_steps=3, lr_scheduler={"type": "constant"})
    alone = train(job, f"output_dir={tmp_path / 'alone'}", plan=plan_for(job))
    found = train(job, f"output_dir={tmp_path / 'subset'}", "strategy=best-subset")
    plan = Plan.load(tmp_path / "subset" / "plan.json")
    assert len({worker.device_class for worker in plan.workers}) == 1
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("strategy", every_second(["staged", "model"]))
def test_the_planner_makes_such_plans(tmp_path, strategy):
    job = write_job(tmp_path, max_steps=3, model=toy(blocks=4), lr_scheduler={"type": "constant"})
    alone = train(job, f"output_dir={tmp_path / 'alone'}")
    set_so = (f"strategy={strategy}", "techniques.max_pipeline_stages=null")
    found = train(job, f"output_dir={tmp_path / strategy}", *set_so)
    plan = Plan.load(tmp_path / strategy / "plan.json")
    assert plan.strategy == strategy and len(plan.stages) > 1
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
