"""A run in stages of which a device becomes slow: its stage shares micro-batches anew, live."""

from __future__ import annotations

import pytest

from gpumix.cost.predict import predict
from gpumix.train.controller import JobController, UserPlan
from helpers.runs.jobs import metrics, plan_for, staged_plan_for, toy, train, write_job

STEPS, BATCH = 26, 12
# So slow that nothing but computing counts.
CLUSTER = [{"class": "same", "emulate": "0.2 GFLOP/s", "memory": "64 MiB", "count": 3}]
USUAL = {
    "cluster": CLUSTER,
    "max_steps": STEPS,
    "global_batch_size": BATCH,
    "data": {"factory": "toys:tokens", "arguments": {"samples": 1000}, "validation_split": 0},
    "optimizer": {"lr": 1e-4},
    "lr_scheduler": {"type": "constant"},
    "techniques": {"tensor_parallel_size": [1], "leave_out": False},
}


def model(**harm):
    return toy(width=32, blocks=2, **harm)


def on_one_device(folder) -> list[float]:
    """The losses of the same steps where nothing is dealt."""
    one = [{"class": "one", "accelerator": "cpu", "memory": "64 MiB"}]
    job = write_job(folder, model=model(), **USUAL | {"cluster": one})
    return train(job, plan=plan_for(job, (BATCH,), (1.0,))).losses


@pytest.mark.extended
@pytest.mark.slow
def test_micro_batches_go_to_the_other_worker_and_losses_stay(tmp_path):
    sound = write_job(tmp_path / "sound", model=model(), **USUAL)
    pipeline = JobController.of_file(sound, (), debug=False)
    profile = pipeline.profile()
    plan = staged_plan_for(sound, [(BATCH,), (6, 6)], micro_batch=1, zero_stage=3, waves=3)
    plan = plan.model_copy(update={"prediction": predict(profile, plan)})
    expected = on_one_device(tmp_path / "alone")
    slow = model(rank=2, at=20, sample_s=0.15)
    job = write_job(tmp_path / "slow", model=slow, rebalance=True, **USUAL)
    JobController.of_file(job, (), debug=False).train(UserPlan(plan, profile), resume=False)
    run = tmp_path / "slow" / "run"
    (change, *_) = metrics(run, "plan")
    assert change["live"]
    assert change["why"].startswith("device 'same-2' takes")
    assert change["samples"]["same-2"] < 6 < change["samples"]["same-1"]
    assert change["samples"]["same-0"] == BATCH
    (effect, *_) = metrics(run, "rebalanced")
    assert effect["step_s"] < effect["step_before_s"]
    assert not metrics(run, "restart")
    told = metrics(run)
    assert [one["step"] for one in told] == list(range(1, STEPS + 1))
    assert [one["loss"] for one in told] == pytest.approx(expected, rel=1e-5)
