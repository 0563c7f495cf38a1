"""`run.json`: the job as it was understood, in a form that reads back to the same job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from jobs import EMULATED, toy, write_job

from gpumix.spec.cluster_file import written
from gpumix.spec.read import read_cluster, read_job
from gpumix.train.run_record import RunRecord

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
    job = read_job(path, ["steps=7"])
    return job, RunRecord.of(SimpleNamespace(job=job, folder=path.parent))


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_the_job_in_it_is_the_same_job(tmp_path, name):
    written_job = write_job(tmp_path / "job", cluster=CLUSTERS[name], model=toy(width=8))
    job, record = record_of(written_job)
    other = tmp_path / "elsewhere" / "again.yaml"
    other.parent.mkdir()
    other.write_text(record.job_text(), encoding="utf-8")
    assert read_job(other) == job
    assert job.steps == 7


def test_keys_that_nobody_gave_are_not_in_its_text(tmp_path):
    _, record = record_of(write_job(tmp_path))
    assert "tokenizer" not in record.given
    assert record.job["tokenizer"] == "bytes"


def test_it_is_a_document(tmp_path):
    _, record = record_of(write_job(tmp_path))
    record.save(tmp_path / "run.json")
    assert RunRecord.load(tmp_path / "run.json") == record
    assert record.packages["torch"]


def test_a_cluster_written_out_is_the_same_cluster(tmp_path):
    import yaml

    (tmp_path / "one.yaml").write_text(yaml.safe_dump(CLUSTERS["cuda"]))
    cluster = read_cluster(tmp_path / "one.yaml")
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(written(cluster)))
    assert read_cluster(tmp_path / "two.yaml") == cluster
