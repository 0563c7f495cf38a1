"""A host without the memory to read a model's weights is told of before anything is measured."""

from __future__ import annotations

from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import MachineError
from gpumix.schema.reading.read import read_job
from gpumix.train.checks import loading_memory
from gpumix.train.checks.job_contents import build_checked_model
from helpers.errors import raises
from helpers.runs.jobs import OWN_PROFILES, toy, train, write_job

PROCESSES = 3
WIDE = {"hidden_size": 8192, "intermediate_size": 10**8, "num_hidden_layers": 2}  # 10 TB a block


def test_blocks_that_no_host_can_read_are_refused_before_they_are_measured(tmp_path):
    config = {"model_type": "llama", "num_attention_heads": 8, "vocab_size": 64, **WIDE}
    job = write_job(tmp_path, model={"config": config}, **OWN_PROFILES)
    with raises(MachineError, code="host-memory-short") as caught:
        train(job)
    assert f"each of {PROCESSES} processes" in caught.value.why and caught.value.fix
    assert not (tmp_path / "profiles").exists() and not (tmp_path / "run" / "profile.json").exists()


def test_as_much_as_the_processes_need_is_enough(tmp_path, monkeypatch):
    job_file = write_job(tmp_path, model=toy(width=64))
    job = read_job(job_file)
    assert isinstance(job.cluster, Cluster)
    model = build_checked_model(job, job.cluster, tmp_path)
    block = max(unit.trainable for unit in split_into_units(model).units)
    for free in (needed := PROCESSES * 4 * block, needed - 1):
        monkeypatch.setattr(loading_memory, "available_host_bytes", lambda free=free: free)
        if free == needed:
            build_checked_model(job, job.cluster, tmp_path)
            continue
        with raises(MachineError, code="host-memory-short", why=f"{PROCESSES} processes"):
            build_checked_model(job, job.cluster, tmp_path)
