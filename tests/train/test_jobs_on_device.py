"""`gpumix train` and `gpumix doctor` on the CUDA device for tests, beside the same on the CPU."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

import cuda_device
from helpers.runs.jobs import BATCH, checkpoints, gpumix, metrics, plan_for, toy, train, write_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_device.is_here(), reason="runs on the CUDA device for tests"),
    pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three devices"),
]

STEPS = 8
# The context of a process takes 256 MiB of each.
GPUS = [
    {"class": "big", "accelerator": "cuda", "memory": "400 MiB"},
    {"class": "small", "accelerator": "cuda", "memory": "350 MiB", "count": 2, "ordinal": 1},
]
NO_CONTEXT = {"GPUMIX_TEST_CUDA_CONTEXT_MIB": "0"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[float]:
    """The losses on CPUs."""
    return losses_of(trained(tmp_path_factory.mktemp("cpu")))


def trained(folder: Path, *, resume: bool = False, **changes) -> Path:
    job = write_job(folder, max_steps=STEPS, **changes)
    train(job, plan=plan_for(job), resume=resume)
    return folder / "run"


def losses_of(run: Path) -> list[float]:
    return [record["loss"] for record in metrics(run)]


SAVING = {"save_steps": 2, "memory_save_steps": 0, "save_total_limit": 9}


def test_a_run_on_unlike_gpus_saves_beside_training(tmp_path, undisturbed):
    run = trained(tmp_path, cluster=GPUS, **SAVING)
    assert losses_of(run) == pytest.approx(undisturbed, rel=1e-4)
    assert checkpoints(run)[-1] == "step-00000008"


@pytest.mark.extended
def test_a_run_on_unlike_gpus_is_gone_on_with(tmp_path, undisturbed):
    run = trained(tmp_path, cluster=GPUS, **SAVING)
    for name in ("step-00000006", "step-00000008"):
        shutil.rmtree(run / "checkpoints" / name)
    trained(tmp_path, cluster=GPUS, **SAVING, resume=True)
    assert losses_of(run)[-4:] == pytest.approx(undisturbed[-4:], rel=1e-4)


@pytest.mark.extended
def test_a_killed_rank_is_replaced_from_copies_in_memory(tmp_path, undisturbed):
    """The copies are made by a stream of their own into memory that is registered."""
    harm = toy(fault="kill", rank=1, at=4)
    kept = {"memory_save_steps": 1}
    run = trained(tmp_path, model=harm, cluster=GPUS, max_restarts=3, **kept)
    restarts = metrics(run, "restart")
    assert restarts and restarts[0]["resumed_from"] in (2, 3)
    assert losses_of(run) == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.extended
def test_a_plan_that_takes_more_memory_than_there_is_is_made_again(tmp_path):
    """By the allocator's limit of a class, and with CUDA's words."""
    usual = {"model": toy(width=512), "optimizer": {"lr": 1e-4}}
    whole = [{"class": "big", "accelerator": "cpu", "memory": "400 MiB", "count": 3}]
    expected = losses_of(trained(tmp_path / "cpu", cluster=whole, **usual))
    less = [
        {"class": "big", "accelerator": "cuda", "memory": "300 MiB"},
        {"class": "small", "accelerator": "cuda", "memory": "40 MiB", "count": 2, "ordinal": 1},
    ]
    job = write_job(tmp_path, cluster=less, max_restarts=3, max_steps=STEPS, **usual)
    plan_for(job, shares=(0.1, 0.8, 0.1)).save(tmp_path / "plan.json")
    options = ("--plan", "plan.json")
    done = gpumix("train", job.name, *options, folder=tmp_path, env=NO_CONTEXT, timeout_s=120)
    assert done.code == 0, done.err
    (restart,) = metrics(tmp_path / "run", "restart")
    assert restart["why"] == "out of memory"
    # Or with less, if less could be had when memory ran out.
    told = r"planning again, with (\d+)% of the memory of class 'small'"
    assert int(re.fullmatch(told, restart["decided"])[1]) <= 92
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=1e-3)


@pytest.mark.extended
def test_the_doctor_of_a_job_on_gpus(tmp_path):
    """It trains windows on them, and writes nothing where the job would."""
    one = [{"class": "big", "accelerator": "cuda", "memory": "400 MiB"}]
    job = write_job(tmp_path, cluster=one, precision="fp32", global_batch_size=BATCH)
    options = ("--json", "--pairs", "3", "--steps", "3")
    done = gpumix("doctor", job.name, *options, folder=tmp_path, timeout_s=200)
    assert done.code == 0, done.err
    assert done.json()["trained_s"] > 0
    assert not (tmp_path / "run").exists()
