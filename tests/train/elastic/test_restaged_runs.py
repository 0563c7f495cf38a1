"""A run in stages whose device becomes slow starts by another plan, from the state of that step."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from statistics import fmean, median

import pytest

from gpumix.schema.plan.plan import Plan
from gpumix.train.controller import JobController, UserPlan
from gpumix.train.elastic.rebalancer import WINDOW_STEPS
from gpumix.train.rebalance_controller import MEASURED_STEPS
from helpers.processes.commands import begin
from helpers.runs.jobs import environment, metrics, toy, write_job

# So slow that nothing but computing counts.
CLUSTER = [{"class": "same", "emulate": "0.2 GFLOP/s", "memory": "64 MiB", "count": 3}]
LIMIT_S = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(240)]


def test_a_slow_device_gets_fewer_units(tmp_path):
    usual = {
        "cluster": CLUSTER,
        "strategy": "staged",
        "techniques": {"tensor_parallel_size": [1], "leave_out": False},
        "rebalance": True,
        "max_restarts": 3,
        "lr_scheduler": {"type": "constant"},
        "optimizer": {"lr": 1e-4},
    }
    sound = write_job(tmp_path / "sound", model=toy(blocks=6, width=64), max_steps=16, **usual)
    pipeline = JobController.of_file(sound, ["advanced.rebalance=false"], debug=False)
    profile = pipeline.profile()
    plan = pipeline.plan(profile)
    pipeline.train(UserPlan(plan, profile), resume=False)
    device = max(plan.workers, key=lambda worker: _work_of(plan, worker.device)).device
    rank = [worker.device for worker in plan.workers].index(device)
    slow = toy(blocks=6, width=64, rank=rank, at=10, sample_s=0.05)
    job = write_job(tmp_path, model=slow, max_steps=100_000, **usual)
    profile.save(tmp_path / "plan.profile.json")
    plan.save(tmp_path / "plan.json")
    said, run = _until_started_again(job)
    (restart,) = metrics(run, "restart")[:1]
    assert restart["why"].startswith(f"device '{device}' takes"), said
    assert "planning again, by the times that devices take now" in said
    (plan_event,) = metrics(run, "plan")[:1]
    assert plan_event["why"] == restart["decided"]
    work, before = (
        plan_event[f"blocks{when}"][device] * plan_event[f"samples{when}"][device]
        for when in ("", "_before")
    )
    assert work < before == _work_of(plan, device)
    steps = metrics(run)
    assert [one["step"] for one in steps] == list(range(1, len(steps) + 1))
    assert restart["resumed_from"] == restart["step"] - 1
    for mine, other in zip(steps, metrics(tmp_path / "sound" / "run")):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert _work_of(Plan.load(run / "plan.json"), device) < _work_of(plan, device)
    (effect,) = metrics(run, "rebalanced")
    assert effect["step_before_s"] == pytest.approx(
        fmean(one["step_s"] for one in steps[: restart["resumed_from"]][-WINDOW_STEPS:])
    )
    assert effect["step_s"] == pytest.approx(
        median(one["step_s"] for one in steps[: effect["step"]][-MEASURED_STEPS + 1 :])
    )


def _until_started_again(job: Path) -> tuple[str, Path]:
    """What the run says until it is known what that came to, and its folder."""
    folder, run = job.parent, job.parent / "run"
    command = [sys.executable, "-m", "gpumix", "train", "job.yaml", "--plan", "plan.json"]
    env = environment(folder) | {"COLUMNS": "300"}
    process = begin(command, folder=folder, env=env, said=folder / "said")
    try:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            if (run / "metrics.jsonl").exists() and metrics(run, "rebalanced"):
                break
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return (folder / "said").read_text(encoding="utf-8"), run


def _work_of(plan: Plan, device: str) -> int:
    return sum(
        len(stage.units) * worker.samples
        for stage in plan.stages
        for worker in stage.workers
        if worker.device == device
    )
