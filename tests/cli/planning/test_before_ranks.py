"""Heads that no tensor-parallel group can divide evenly, more stages than there can be, and
strategies that can have no plan, are told before anything starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpumix.cli import app
from gpumix.cli.planning import profile_source
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage
from gpumix.train.processes.runner import LocalRunner
from helpers.extended import every_second
from helpers.runs.jobs import BATCH, plan_for, write_job
from helpers.runs.verbs import here

CASES = {
    "heads": (3, 3, 2, "the model's 3 heads cannot be divided over 2 ranks"),
    "one key head": (4, 1, 2, "the model's 1 key head cannot be divided over 2 ranks"),
    "key heads": (8, 2, 4, "the model's 2 key heads cannot be divided over 4 ranks"),
}


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    def started(*arguments, **options):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(LocalRunner, "run", started)


def job_with(
    folder: Path, heads: int, key_heads: int, degree: int, *, layers: int = 2, **changes
) -> Path:
    config = {
        "model_type": "llama",
        "hidden_size": 8 * heads,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": 32,
        "max_position_embeddings": 16,
    }
    cluster = [{"class": "one", "accelerator": "cpu", "memory": "64 MiB", "count": degree}]
    return write_job(folder, model={"config": config}, cluster=cluster, **changes)


@pytest.mark.parametrize("verb", ["train", "profile"])
@pytest.mark.parametrize("case", CASES)
def test_of_tp_groups_that_the_job_wants(tmp_path, case, verb):
    heads, key_heads, degree, told = CASES[case]
    job_with(tmp_path, heads, key_heads, degree, techniques={"tensor_parallel_size": degree})
    assert_refused(tmp_path, told, verb, "job.yaml")


@pytest.mark.parametrize("case", CASES)
def test_of_tp_groups_of_a_given_plan(tmp_path, case):
    heads, key_heads, degree, told = CASES[case]
    job = job_with(tmp_path, heads, key_heads, degree)
    alone = plan_for(job, [BATCH] + [0] * (degree - 1), [1.0] + [0.0] * (degree - 1))
    in_a_tp_group(alone).save(tmp_path / "plan.json")
    err = assert_refused(tmp_path, told, "train", "job.yaml", "--plan", "plan.json")
    assert "plan.json: stage 1" in err


@pytest.mark.parametrize("verb", ["train", "profile"])
@pytest.mark.parametrize(
    ("devices", "techniques", "told"),
    [
        (4, {"min_pipeline_stages": 3}, "no plan of 3 stages: there are 4 devices, of which"),
        (2, {"min_pipeline_stages": 9}, "each may have 2 stages, and 2 units"),
        (
            2,
            {"min_pipeline_stages": 2, "tensor_parallel_size": 2},
            "a single tensor-parallel group of 2 has one stage",
        ),
        (1, {"min_pipeline_stages": 2}, "one device alone has one stage"),
    ],
)
def test_of_stages_that_the_job_wants(tmp_path, devices, techniques, told, verb):
    job_with(tmp_path, 4, 4, devices, techniques=techniques)
    assert_refused(tmp_path, told, verb, "job.yaml")


STRATEGIES = [
    (1, "staged", {}, "one device alone has one stage"),
    (2, "staged", {"tensor_parallel_size": 2}, "a single tensor-parallel group of 2 has one stage"),
    (2, "staged", {"orders": "sequential"}, "with orders sequential: it needs layered"),
    (1, "model", {}, "one device alone has one stage"),
    (2, "model", {"tensor_parallel_size": 2}, "with tensor_parallel_size 2: it needs 1"),
    (2, "model", {"zero_stages": [1, 2]}, "with zero_stages 1 or 2: it needs 0"),
    (
        2,
        "even",
        {"min_pipeline_stages": 2},
        "the strategy does not choose the number of stages",
    ),
]


@pytest.mark.parametrize(("devices", "strategy", "techniques", "told"), STRATEGIES)
def test_of_strategies_that_make_stages(tmp_path, devices, strategy, techniques, told):
    job_with(tmp_path, 4, 4, devices, techniques=techniques)
    assert_refused(tmp_path, told, "train", "job.yaml", "--strategy", strategy)


@pytest.mark.parametrize("strategy", ["staged", "model"])
def test_of_stages_of_a_model_of_one_unit(tmp_path, strategy):
    job_with(tmp_path, 4, 4, 2, layers=1, strategy=strategy)
    assert_refused(tmp_path, "a model of one unit has one stage", "train", "job.yaml")


@pytest.mark.parametrize("own", every_second(["staged", "even"]))
def test_a_job_is_measured_for_the_strategy_that_is_asked_for(tmp_path, monkeypatch, own):
    """Not for that of the job, which may have no plan where another has one."""
    job_with(tmp_path, 4, 4, 1, strategy=own)
    asked_for = []

    def run(command, **_):
        given = CliRunner().invoke(app, command[command.index("profile") :])
        asked_for.append(given.stderr)
        return subprocess.CompletedProcess(command, given.exit_code or 3, given.stdout)

    monkeypatch.setattr(profile_source.subprocess, "run", run)
    here("plan", "job.yaml", "--strategy", "staged", folder=tmp_path)
    here("plan", "job.yaml", "--strategy", "even", folder=tmp_path)
    here("compare", "job.yaml", folder=tmp_path)
    refused, *measured = asked_for
    assert "one device alone has one stage" in refused
    assert all("ranks were started" in one for one in measured)


def in_a_tp_group(plan: Plan) -> Plan:
    """All of its workers, each with what the first one has."""
    (stage,) = plan.stages
    first = stage.workers[0]
    workers = tuple(first.model_copy(update={"device": w.device}) for w in stage.workers)
    tp_group = Stage(units=stage.units, workers=workers, tensor=len(workers))
    return Plan.model_validate(plan.model_dump() | {"stages": (tp_group,)})


def assert_refused(folder: Path, told: str, *arguments: str) -> str:
    done = here(*arguments, folder=folder)
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    assert told in done.err
    assert not (folder / "run").exists()
    return done.err
