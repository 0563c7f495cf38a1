"""A job and a function on a real Ray of this machine, whose nodes have made-up resources.

Ray is no part of what tests need: `make test-extras` installs it and runs these, `.ci/run` those
that are quick.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.errors import raises
from helpers.paths import USER_CODE

ray = pytest.importorskip("ray")

from gpumix.integrations.ray import Workers, run, train  # noqa: E402 - it needs Ray
from gpumix.schema.errors import InputError, Interrupted, MachineError, TrainingError  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WORKERS = {
    "fast": Workers(1, {"rack": "a"}, {"CPU": 1, "fast": 1}),
    "slow": Workers(2, {}, {"CPU": 1, "slow": 1}),
}
JOB: dict[str, Any] = {
    "model": {"factory": "toys:model"},
    "data": {"factory": "toys:tokens", "validation_split": 0.1},
    "sequence_length": 8,
    "global_batch_size": 8,
    "max_steps": 4,
    "optimizer": {"lr": 1e-2},
    "cluster": [
        {"class": "fast", "emulate": "50 GFLOP/s", "memory": "64 MiB"},
        {"class": "slow", "emulate": "25 GFLOP/s", "memory": "32 MiB", "count": 2},
    ],
    "output_dir": "run",
    "logging_steps": 1,
    "advanced": {
        "profile_cache": "profiles",
        "profile_budget": 20,
        "max_restarts": 0,
        "rebalance": False,
    },
    "techniques": {"max_pipeline_stages": 1, "leave_out": False},
}


@pytest.fixture(scope="module")
def cluster():
    os.environ.update(RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1")
    paths = [str(USER_CODE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    ray.init(
        num_cpus=4,
        resources={"fast": 1, "slow": 2},
        labels={"rack": "a"},
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as of a script
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB, sort_keys=False))
    return folder


@pytest.fixture
def there(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def trained(cluster, folder) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary of a run whose devices were measured, and its metrics."""
    told: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return train("job.yaml", WORKERS, allow=["toys"], on_metrics=told.append), told


def test_a_job_trains_to_the_losses_of_gpumix_train(trained, folder):
    summary, told = trained
    steps = [event for event in told if "loss" in event]
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert [event["loss"] for event in steps] == summary["losses"]
    command = [sys.executable, "-m", "gpumix", "train", "job.yaml", "--allow", "toys", "--json"]
    command += ["--plan", "run/plan.json", "--set", "output_dir=alone"]
    alone = subprocess.run(command, cwd=folder, capture_output=True, check=True)
    assert summary["losses"] == json.loads(alone.stdout)["losses"]


def test_the_error_of_ranks_is_told_as_it_is(trained, there):
    with raises(InputError, code="document-unreadable", where="no-plan.json") as found:
        train("job.yaml", WORKERS, plan="no-plan.json", allow=["toys"])
    assert found.value.__cause__ is None


def test_who_interrupts_a_job_has_a_checkpoint(trained, there):
    def enough(event: dict[str, Any]) -> None:
        if event.get("step") == 3:
            raise KeyboardInterrupt

    settings = ["output_dir=interrupted", "max_steps=100000"]
    with raises(Interrupted, code="stopped-after-step"):
        train(
            "job.yaml",
            WORKERS,
            plan="run/plan.json",
            overrides=settings,
            allow=["toys"],
            on_metrics=enough,
        )
    assert any((there / "interrupted" / "checkpoints").glob("step-*"))


def test_metrics_are_reported_to_ray_tune(trained, folder):
    tune = pytest.importorskip("ray.tune")

    def trial(config: dict[str, Any]) -> None:
        os.chdir(folder)
        settings = ["output_dir=tuned", f"optimizer.lr={config['lr']}"]
        train("job.yaml", WORKERS, plan="run/plan.json", overrides=settings, allow=["toys"])

    found = tune.Tuner(
        tune.with_resources(trial, {"CPU": 1}),
        param_space={"lr": 1e-2},
        run_config=tune.RunConfig(storage_path=str(folder / "tune"), verbose=0),
    ).fit()[0]
    assert found.error is None
    assert found.metrics["step"] == 4
    assert found.metrics["loss"] == trained[0]["losses"][-1]


def _sums(own: float) -> tuple[str, str, float]:
    import torch
    import torch.distributed as dist

    from gpumix.engine.comm.init_distributed import ensure_process_group

    rank = os.environ["RANK"]
    if own < 0 and rank == "1":
        raise ValueError("of the function's own")
    ensure_process_group(on_gpus=False)
    summed = torch.tensor(own + int(rank))
    dist.all_reduce(summed)
    return rank, os.environ["LOCAL_WORLD_SIZE"], summed.item()


def test_a_function_is_called_on_ranks_that_meet(cluster):
    assert run(_sums, WORKERS, args=[1.0]) == [(str(rank), "3", 6.0) for rank in range(3)]


def test_a_functions_own_error_is_the_cause(cluster, monkeypatch):
    monkeypatch.setattr("gpumix.integrations.ray.GRACE_S", 0.5)
    with raises(
        TrainingError, code="function-failed", what="ValueError: of the function's own"
    ) as found:
        run(_sums, WORKERS, args=[-1.0])
    assert isinstance(found.value.__cause__, ValueError)
    assert found.value.where == "rank 1"


def test_workers_that_are_not_there_are_named(cluster):
    with raises(MachineError, code="ray-placement-timeout", why=("A100", 0, 1)):
        run(_sums, {"A100": 1} | WORKERS, args=[1.0], timeout_s=2)


def test_workers_that_ask_for_a_label_that_no_node_has_get_no_other_node(cluster):
    """The only node has all else that they ask for."""
    asked = {"fast": Workers(1, {"rack": "b"}, {"CPU": 1, "fast": 1})}
    with raises(MachineError, code="ray-placement-timeout", why=("fast", "rack=b", 0, 1)):
        run(_sums, asked, args=[1.0], timeout_s=2)
