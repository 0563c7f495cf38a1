"""`--dry-run` of `gpumix train` and `gpumix launch`: refuses what a start refuses, tells what would
run where, starts no rank and leaves no file behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from gpumix.profiler.cache.measurement_cache import MeasurementCache
from gpumix.schema.plan.plan import Plan
from gpumix.train.processes.runner import LocalRunner
from helpers.runs.jobs import CLUSTER, PAIR, plan_for
from helpers.runs.jobs import train as train_job
from helpers.runs.jobs import write_job as write_toy_job
from helpers.runs.verbs import here, write_job

BIG = [{"class": "rtx3090", "accelerator": "cuda", "memory": "24 GiB", "count": 2}]


@pytest.fixture
def no_ranks(monkeypatch):
    def started(*arguments, **options):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(LocalRunner, "run", started)
    monkeypatch.setattr(LocalRunner, "warm_up", started)


def files_of(folder: Path) -> set[tuple[str, float]]:
    found = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {(str(path.relative_to(folder)), path.stat().st_mtime_ns) for path in found}


def dry(folder: Path, *more: str, code: int = 0):
    before = files_of(folder)
    done = here("train", "job.yaml", "--dry-run", *more, folder=folder)
    assert done.code == code, f"{done.out}\n{done.err}"
    assert files_of(folder) == before
    return done


def test_of_a_job_that_is_not_measured(tmp_path, no_ranks):
    write_toy_job(tmp_path, profile_cache="profiles")
    done = dry(tmp_path)
    for told in (
        "The plan is made once the devices are measured",
        "rank 0 on 1x big",
        "ranks 1-2 on 2x small",
        "measures this model on big, small, 20 s each at most",
        "samples of toys:tokens",
        "nothing was started or written",
    ):
        assert told in done.out, done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_of_a_measured_job_has_the_plan_that_the_start_makes(tmp_path):
    job = write_toy_job(tmp_path, cluster=PAIR, max_steps=2, profile_cache="profiles")
    train_job(job)
    made = Plan.load(tmp_path / "run" / "plan.json")
    told = json.loads(dry(tmp_path, "--set", "output_dir=other", "--json").out)
    assert told["basis"] == "measured"
    assert Plan.model_validate(told["plan"]).stages == made.stages
    assert [(one["rank"], one["class"]) for one in told["ranks"]] == [(0, "pair"), (1, "pair")]
    assert not (tmp_path / "other").exists()


def test_of_a_given_plan(tmp_path, no_ranks):
    job = write_toy_job(tmp_path)
    plan_for(job).save(tmp_path / "plan.json")
    told = json.loads(dry(tmp_path, "--plan", "plan.json", "--json").out)
    assert told["basis"] == "given"
    assert [one["class"] for one in told["ranks"]] == ["big", "small", "small"]


def test_of_gpus_that_datasheets_know(tmp_path, no_ranks, monkeypatch):
    monkeypatch.setattr("gpumix.hardware.device.check_accelerator", lambda *a: None)
    write_job(tmp_path, cluster=BIG, tokenizer="bytes")
    told = json.loads(dry(tmp_path, "--json").out)
    assert told["basis"] == "estimated"
    assert told["plan"]["global_batch"] == 8
    page = dry(tmp_path).out
    assert "±33%" in page
    assert "\n1 step: about " in page


def test_the_strategy_is_that_of_the_start(tmp_path, no_ranks, monkeypatch):
    monkeypatch.setattr("gpumix.hardware.device.check_accelerator", lambda *a: None)
    write_job(tmp_path, cluster=BIG)
    told = json.loads(dry(tmp_path, "--strategy", "even", "--json").out)
    assert told["plan"]["strategy"] == "even"


REFUSED = {
    "text that is not there": ({"data": {"text": ["missing"]}}, 2, "not there"),
    "an empty text": ({"data": {"text": ["empty.txt"]}}, 2, "the file is empty"),
    "a key of the model with a typo": (
        {"model": {"config": {"model_type": "llama", "num_key_value_head": 2}}},
        2,
        "num_key_value_heads",
    ),
    "too small a vocabulary": (
        {"model": {"config": {"model_type": "llama", "vocab_size": 100}}},
        2,
        "the tokenizer has 257 tokens",
    ),
    "GPUs that are not here": ({"cluster": BIG}, 3, "torch sees no GPU"),
    "weights that are not there": (
        {"model": {"config": {"model_type": "llama"}, "weights": "missing"}},
        2,
        "model.weights",
    ),
    "a tracker that does not exist": ({"report_to": "wandbb"}, 2, "wandb"),
    "a folder that is a file": ({"output_dir": "a.txt"}, 2, "it must be a folder"),
    "a folder below a file": ({"output_dir": "a.txt/run"}, 3, "cannot write"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_start_refuses(tmp_path, no_ranks, case):
    changes, code, told = REFUSED[case]
    write_job(tmp_path, **({"cluster": CLUSTER} | changes))
    (tmp_path / "empty.txt").touch()
    done = dry(tmp_path, code=code)
    assert told in done.err
    assert done.err.count("gpumix: ") == 1
    assert not done.out


def test_a_plan_that_does_not_fit(tmp_path, no_ranks, monkeypatch):
    from helpers.runs.verbs import measured

    small = measured()
    classes = tuple(one.model_copy(update={"memory_bytes": 2**16}) for one in small.cluster.classes)
    cluster = small.cluster.model_copy(update={"classes": classes})
    tight = small.model_copy(update={"cluster": cluster})
    monkeypatch.setattr(MeasurementCache, "load", lambda self: tight)
    write_job(tmp_path, cluster=CLUSTER)
    assert "short of" in dry(tmp_path, code=4).err


def test_a_run_that_is_there(tmp_path):
    job = write_toy_job(tmp_path, cluster=PAIR, max_steps=2)
    train_job(job)
    assert "checkpoints of an earlier run" in dry(tmp_path, code=2).err
    assert "Dry run" in dry(tmp_path, "--resume").out


def test_no_start_from_nothing(tmp_path, no_ranks):
    write_toy_job(tmp_path)
    assert "start the run without --resume" in dry(tmp_path, "--resume", code=2).err


def test_one_of_several_processes(tmp_path, no_ranks, monkeypatch):
    write_toy_job(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in dry(tmp_path, code=2).err


# -- launch ----------------------------------------------------------------------------------------

SCRIPT = "open('ran', 'w').close()\n"


def launch(folder: Path, *words: str, code: int = 0):
    before = files_of(folder)
    done = here("launch", *words, folder=folder)
    assert done.code == code, f"{done.out}\n{done.err}"
    assert files_of(folder) == before
    return done


def test_a_script_of_this_host(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER), encoding="utf-8")
    words = ("--cluster", "cluster.yaml", "--dry-run")
    done = launch(tmp_path, *words, "train.py", "--lr", "1e-3")
    assert "train.py --lr 1e-3" in " ".join(done.out.split())
    assert "ranks 0 to 2 on localhost" in done.out
    told = json.loads(launch(tmp_path, *words, "--json", "train.py").out)
    assert told["hosts"] == [{"host": "localhost", "first_rank": 0, "processes": 3}]


def test_a_module_that_is_not_there(tmp_path):
    told = launch(tmp_path, "--dry-run", "--processes", "1", "-m", "missing_module", code=2).err
    assert "there is no module 'missing_module'" in told


def test_a_job_of_this_host_is_checked_by_train(tmp_path, monkeypatch):
    write_toy_job(tmp_path)
    became = []
    monkeypatch.setattr("gpumix.hardware.host.environment.exec_python", became.append)
    launch(tmp_path, "--dry-run", "job.yaml")
    launch(tmp_path, "job.yaml", "--dry-run")
    assert became == [("-m", "gpumix", "train", "job.yaml", "--dry-run")] * 2


@pytest.mark.parametrize("more", [("--print-commands",), ("--template", "slurm")])
def test_printed_commands_are_no_dry_run(tmp_path, more):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    hosts = ("--hosts", "a:1,b:1")
    done = launch(tmp_path, *hosts, *more, "--dry-run", "train.py", code=2)
    assert "--dry-run has no effect" in done.err
