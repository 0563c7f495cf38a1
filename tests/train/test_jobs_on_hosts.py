"""Jobs whose parameters are in memory that the ranks of a host share."""

from __future__ import annotations

import pytest

from gpumix.schema.plan.plan import Plan
from gpumix.train.controller import JobController
from helpers.runs.jobs import metrics, plan_for, progress, toy, train, write_job

KILLED_IN = 3


def on_host(plan: Plan) -> Plan:
    """The same plan with parameters on the host."""
    stage = plan.stages[0]
    workers = tuple(w.model_copy(update={"state_on": "host"}) for w in stage.workers)
    told = plan.model_dump() | {
        "parameters_on": "host",
        "stages": [stage.model_copy(update={"workers": workers}).model_dump()],
    }
    return Plan.model_validate(told)


def on_device(plan: Plan) -> Plan:
    return plan


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """Losses of the same job with parameters on devices."""
    job = write_job(tmp_path_factory.mktemp("devices"))
    return train(job, plan=plan_for(job)).losses


@pytest.mark.parametrize("clips", [True, False])
def test_a_job_trains_as_with_parameters_on_devices(tmp_path, clips):
    changes = {"eval_steps": 2, "max_grad_norm": 1.0 if clips else None}
    found = {}
    for place, change in (("device", on_device), ("host", on_host)):
        job = write_job(tmp_path / place, **changes)
        found[place] = train(job, plan=change(plan_for(job))).losses
        found[place, "eval"] = metrics(tmp_path / place / "run", "evaluation")
    assert found["host"] == pytest.approx(found["device"], rel=1e-6)
    assert len(found["host", "eval"]) == len(found["device", "eval"]) > 0


def test_a_run_goes_on_with_parameters_elsewhere(tmp_path):
    """From a checkpoint, both ways."""
    steady = {"lr_scheduler": {"type": "constant"}}
    whole = write_job(tmp_path / "whole", **steady)
    expected = train(whole, plan=plan_for(whole)).losses
    for name, first, second in (("to", on_device, on_host), ("from", on_host, on_device)):
        folder = tmp_path / name
        job = write_job(folder, max_steps=3, **steady)
        train(job, plan=first(plan_for(job)))
        job = write_job(folder, max_steps=6, **steady)
        losses = train(job, plan=second(plan_for(job, (2, 4, 2))), resume=True).losses
        assert losses == pytest.approx(expected[3:], rel=1e-5)


def test_a_rank_is_killed(tmp_path, expected):
    copied = {"memory_save_steps": 1, "max_restarts": 3}
    fault = toy(fault="kill", rank=1, at=KILLED_IN, once=str(tmp_path / "killed"))
    job = write_job(tmp_path, model=fault, **copied)
    train(job, plan=on_host(plan_for(job)))
    told = metrics(tmp_path / "run")
    assert [one["step"] for one in told] == list(range(1, len(expected) + 1))
    assert [one["loss"] for one in told] == pytest.approx(expected, rel=1e-5)
    (restart,) = metrics(tmp_path / "run", "restart")
    assert (restart["kept_in"], restart["resumed_from"]) == ("memory", KILLED_IN - 1)
    assert progress(tmp_path / "run")["state"] == "finished"


def test_a_planned_job(tmp_path):
    techniques = {"parameters_on": "host", "max_pipeline_stages": 1, "leave_out": False}
    job = write_job(tmp_path, techniques=techniques)
    controller = JobController.of_file(job, [], debug=True)
    plan = controller.plan(controller.profile())
    assert plan.parameters_on == "host"
    assert all(worker.host_bytes for worker in plan.prediction.workers)
    losses = train(job).losses
    assert len(losses) == 6 and losses[-1] < losses[0]
