"""A step's results that are read when the next step was given: the run tells, and keeps, the same
as one that reads each at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_device import is_here
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import TrainingError
from gpumix.schema.reading.read import read_job
from gpumix.train.processes.local_launcher import launch
from gpumix.train.rank_setup.context import Task
from helpers.errors import raises
from helpers.extended import every_second, left_out
from helpers.runs import late_runs
from helpers.runs.jobs import PAIR, metrics, plan_for, write_job

BOTH = (0, 1)
NOT_OF_A_CLOCK = ("event", "step", "loss", "gradient_norm", "learning_rate", "tokens", "samples")


def run(
    folder: Path,
    *,
    late: tuple[int, ...],
    bad_step: int | None = None,
    resume: bool = False,
    **changes: Any,
) -> list[float]:
    """The losses of a run of two ranks; those are `late` whose results can be."""
    changes = {"optimizer": {"lr": 1e-2}, "max_grad_norm": 1.0} | changes
    job_file = write_job(folder, cluster=PAIR, max_steps=9, **changes)
    job = read_job(job_file)
    plan = plan_for(job_file, samples=(5, 3), shares=(0.5, 0.5))
    devices = tuple(job.cluster.in_rank_order())
    task = Task(job, job.cluster, folder)
    return launch(late_runs.train, devices, task, plan, devices, late, bad_step, resume)[0]


def on_gpu(folder: Path, function: Callable[..., Any], *settings: Any, **changes: Any) -> list[Any]:
    """What `function` of `late_runs` returns of a run on one GPU."""
    gpu = [{"class": "card", "accelerator": "cuda", "memory": "1 GiB"}]
    job_file = write_job(folder, cluster=gpu, max_steps=9, **changes)
    job = read_job(job_file)
    plan = plan_for(job_file, samples=(8,), shares=(1.0,))
    devices = tuple(job.cluster.in_rank_order())
    task = Task(job, job.cluster, folder)
    return launch(function, devices, task, plan, devices, *settings)[0]


def told(folder: Path) -> list[dict[str, Any]]:
    """What of a run's record is no time, in its order. Checkpoints are whole when they are."""
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [
        {key: one[key] for key in NOT_OF_A_CLOCK if key in one}
        for one in found
        if one["event"] in ("step", "evaluation", "classes", "ranks")
    ]


OPTIMIZERS = [
    {"optimizer": {"lr": 1e-2}, "max_grad_norm": 1.0},
    {"optimizer": {"lr": 1e-2}, "max_grad_norm": None},  # steps while gradients are computed
    {"optimizer": {"name": "sgd", "momentum": 0.9, "lr": 1e-2}},
]


@pytest.mark.parametrize(
    "optimizer",
    left_out(OPTIMIZERS, OPTIMIZERS[1:]),
    ids=["clipped", "early", "sgd"],
)
def test_a_run_tells_the_same(tmp_path, optimizer):
    changes = {
        **optimizer,
        "eval_steps": 4,
        "save_steps": 3,
        "memory_save_steps": 0,
        "logging_steps": 2,
    }
    losses = run(tmp_path / "late", late=BOTH, **changes)
    assert losses == run(tmp_path / "at once", late=(), **changes)
    assert told(tmp_path / "late") == told(tmp_path / "at once")
    saved = [one["step"] for one in metrics(tmp_path / "late" / "run", "checkpoint")]
    assert saved == [3, 6, 9]


def test_ranks_read_alike_where_one_must_read_at_once(tmp_path):
    """An optimizer on the host, say, waits for each step: so do the others."""
    changes = {"eval_steps": 2, "logging_steps": 1, "rebalance": True}
    assert run(tmp_path / "one", late=(1,), **changes)
    assert [one["step"] for one in metrics(tmp_path / "one" / "run")] == list(range(1, 10))


@pytest.mark.parametrize("late", every_second([(BOTH,), ((),)]), ids=["late", "at once"])
def test_a_bad_step_leaves_the_state_before_it(tmp_path, late):
    """The step that was given before the bad one was known changed nothing either, and its samples
    come again."""
    kept = {"memory_save_steps": 0}
    with raises(TrainingError, code="step-not-finite", what=5) as error:
        run(tmp_path / "late", late=late, bad_step=5, **kept)
    assert "step-00000004" in str(error.value)
    assert [one["step"] for one in metrics(tmp_path / "late" / "run")] == [1, 2, 3, 4]
    resumed = run(tmp_path / "late", late=late, resume=True, **kept)
    assert resumed == run(tmp_path / "whole", late=BOTH, **kept)[4:]


# -- on a GPU, or the CUDA device for tests --------------------------------------------------------

DEVICE_FOR_TESTS = pytest.mark.skipif(not is_here(), reason="waits are counted by the test device")
COMPARED = {"backward_hooks.py"}
COPIES = {"host_copy.py", "dcp_storage.py"}  # beside the loop, in threads of their own


@pytest.mark.gpu
@DEVICE_FOR_TESTS
@pytest.mark.parametrize("optimizer", every_second(OPTIMIZERS[:2]), ids=["clipped", "early"])
def test_no_step_of_the_loop_waits_for_the_device(tmp_path, optimizer):
    """But for the first, whose optimizer makes its state: its results are read before that, and
    what it computes again is compared."""
    changes = {**optimizer, "save_steps": 4, "logging_steps": 2}
    losses, waits = on_gpu(tmp_path, late_runs.waits, **changes)
    assert len(losses) == len(waits) == 9
    files = [{Path(place.rpartition(":")[0]).name for place in one} - COPIES for one in waits]
    assert files == [{"async_read.py", *COMPARED}, *[set()] * 8]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_bad_step_leaves_the_state_before_it(tmp_path):
    changes = {
        "optimizer": {"lr": 1e-2},
        "max_grad_norm": 1.0,
        "memory_save_steps": 0,
    }
    whole = on_gpu(tmp_path / "whole", late_runs.train, (), None, False, **changes)
    with raises(TrainingError, code="step-not-finite", what=5):
        on_gpu(tmp_path / "bad", late_runs.train, (), 5, False, **changes)
    steps = [one["step"] for one in metrics(tmp_path / "bad" / "run")]
    assert steps == [1, 2, 3, 4]
    assert on_gpu(tmp_path / "bad", late_runs.train, (), None, True, **changes) == whole[4:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_are_forked_from_a_process_that_has_not_used_cuda():
    device = Device(id="card0", device_class="card", host="localhost")
    assert launch(late_runs.forked, [device, device]) == [(False, False, "1")] * 2
