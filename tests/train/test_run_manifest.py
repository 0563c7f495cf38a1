"""`run.json`: the job as it was understood, in a form that reads back to the same job; or the
script as it was started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpumix.schema.reading.cluster_file import format_cluster
from gpumix.schema.reading.read import read_cluster, read_job
from gpumix.train.run_manifest import RunRecord, Script
from helpers.processes.commands import run
from helpers.runs.jobs import EMULATED, toy, write_job

CLUSTERS = {
    "emulated": EMULATED,
    "auto": "auto",
    "cuda": {
        "classes": {
            "old": {"memory": "11 GiB", "product": "GTX", "compute_capability": "6.1"},
            "new": {"memory": "24 GiB", "peak_flops": "70 TFLOP/s"},
        },
        "devices": [
            {"class": "old", "count": 2, "host": "a", "ordinal": 1},
            {"class": "new", "id": "GPU-1234", "host": "b"},
        ],
        "network": {
            "between": "25GbE",
            "inside": "pcie3",
            "exceptions": [{"classes": ["old", "new"], "where": "between", "link": "1GbE"}],
        },
    },
}  # fmt: skip


def record_of(path):
    job = read_job(path, ["max_steps=7"])
    return job, RunRecord.of(SimpleNamespace(job=job, folder=path.parent))


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_the_job_in_it_is_the_same_job(tmp_path, name):
    written_job = write_job(tmp_path / "job", cluster=CLUSTERS[name], model=toy(width=8))
    job, record = record_of(written_job)
    other = tmp_path / "elsewhere" / "again.yaml"
    other.parent.mkdir()
    other.write_text(record.job_text(), encoding="utf-8")
    assert read_job(other) == job
    assert job.max_steps == 7


def test_keys_that_nobody_gave_are_not_in_its_text(tmp_path):
    _, record = record_of(write_job(tmp_path))
    assert "tokenizer" not in record.given
    assert record.job["tokenizer"] == "bytes"


def test_it_is_a_document(tmp_path):
    _, record = record_of(write_job(tmp_path))
    record.save(tmp_path / "run.json")
    assert RunRecord.load(tmp_path / "run.json") == record
    assert record.packages["torch"]


SCRIPT = """\
from pathlib import Path

from gpumix.train.run_manifest import RunRecord

RunRecord.of_script("Trainer").save(Path("run.json"))
"""


def script_of(folder: Path, *words: str, **env: str) -> Script:
    """What a process records of itself that is started by such words."""
    (folder / "loop.py").write_text(SCRIPT)
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_JOB_ID", "GPUMIX_CLUSTER")}
    done = run([sys.executable, *words], folder=folder, env=kept | env, timeout_s=100)
    assert done.code == 0, done.err
    record = RunRecord.load(folder / "run.json")
    assert record.folder == str(folder) and record.job == {}
    assert record.script is not None
    return record.script


def test_a_script_is_known_by_its_words(tmp_path):
    found = script_of(tmp_path, "-u", "loop.py", "--lr", "3e-4")
    assert found.words == ["loop.py", "--lr", "3e-4"]
    assert (found.processes, found.launcher, found.cluster) == (1, None, None)
    assert script_of(tmp_path, "-m", "loop", "x").words == ["-m", "loop", "x"]


def test_what_is_typed_is_no_script(tmp_path):
    assert script_of(tmp_path, "-c", SCRIPT).words == []


def test_secrets_are_left_out(tmp_path):
    words = ["--hub_token", "t0p", "--api-key=t0p", "hub.token=t0p", "--eos_token", "<eos>"]
    words += ["--max_tokens", "5", "--password"]
    found = script_of(tmp_path, "loop.py", *words)
    assert "t0p" not in (tmp_path / "run.json").read_text()
    assert found.words[1:] == [
        *("--hub_token", "...", "--api-key=...", "hub.token=...", "--eos_token", "<eos>"),
        *("--max_tokens", "5", "--password"),
    ]


@pytest.mark.extended
def test_who_started_it_is_known(tmp_path):
    (tmp_path / "cluster.yaml").write_text("- {class: d, count: 1, memory: 1 GiB, emulate: 1e12}\n")
    launch = ("-m", "gpumix", "launch", "--cluster", "cluster.yaml", "loop.py")
    found = script_of(tmp_path, *launch)
    assert (found.launcher, found.cluster) == ("gpumix launch", str(tmp_path / "cluster.yaml"))
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "loop.py")
    assert script_of(tmp_path, *torchrun, PET_STANDALONE="1").launcher == "torchrun"


def test_a_cluster_written_out_is_the_same_cluster(tmp_path):
    import yaml

    (tmp_path / "one.yaml").write_text(yaml.safe_dump(CLUSTERS["cuda"]))
    cluster = read_cluster(tmp_path / "one.yaml")
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(format_cluster(cluster)))
    assert read_cluster(tmp_path / "two.yaml") == cluster
