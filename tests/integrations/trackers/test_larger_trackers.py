"""W&B offline, MLflow in a database, Trackio on this machine: where they are installed, a run that
starts again, is stopped and goes on is one run there, each step once."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.runs.reported_runs import LOSSES, WHY, job_for, tell_all

STEPS = [(step, pytest.approx(LOSSES[step])) for step in range(1, 7)]


def test_mlflow(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    settings = {"experiment": "mine", "name": "first", "tags": {"who": "me"}}
    job = job_for(tmp_path, {"mlflow": settings})
    tell_all(job)
    client = mlflow.MlflowClient(f"sqlite:///{job.output_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mine")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.tags["who"] == "me"
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in points] == STEPS
    assert run.data.metrics["eval/loss"] == 1.25
    assert WHY in run.data.tags["event/restart"]
    assert run.data.params["job.global_batch_size"] == "8"
    [config] = client.list_artifacts(run.info.run_id)
    kept = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/{config.path}")
    assert kept["plan"]["workers"][0]["device"] == "big-0"
    assert run.info.artifact_uri.startswith(job.output_dir.as_uri())


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/elsewhere")  # which is not for a job to follow
    tell_all(job_for(tmp_path, {"trackio": {"folder": "kept", "project": "mine"}}))
    monkeypatch.delenv("TRACKIO_SPACE_ID")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "kept")
    [name] = SQLiteStorage.get_runs("mine")
    assert name.startswith("run-")
    logs = SQLiteStorage.get_logs("mine", name)
    losses = [(one["step"], one["train/loss"]) for one in logs if "train/loss" in one]
    assert losses == STEPS
    [restart] = [one for one in logs if "event/restart" in one]
    assert restart["event/restart/text"].endswith(WHY)
    assert [one["run/state"] for one in logs if "run/state" in one] == ["interrupted", "finished"]
    assert max(one["step"] for one in logs) == 6


def test_wandb(tmp_path):
    wandb = pytest.importorskip("wandb")
    job = job_for(tmp_path, {"wandb": {"project": "mine", "tags": "toy"}})
    tell_all(job)
    files = sorted((job.output_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2  # of one run, as `wandb sync` puts them together
    every = [list(wandb_records(file)) for file in files]
    runs = [record.run for records in every for record in records if record.HasField("run")]
    assert {(run.run_id, run.project) for run in runs} == {(runs[0].run_id, "mine")}
    assert list(runs[0].tags) == ["toy"]
    exits = [record.exit.exit_code for records in every for record in records if of(record, "exit")]
    assert exits == [130, 0]
    rows = [row(record) for records in every for record in records if of(record, "history")]
    losses = [(one["_step"], one["train/loss"]) for one in rows if "train/loss" in one]
    assert losses == STEPS
    assert [one["eval/loss"] for one in rows if "eval/loss" in one] == [1.25]
    [restart] = [one for one in rows if "event/restart" in one]
    assert restart["event/restart/text"].endswith(WHY)
    config = {one.key: json.loads(one.value_json) for one in runs[0].config.update}
    assert config["job"]["global_batch_size"] == 8
    assert wandb.run is None  # all was in another process


def of(record, kind: str) -> bool:
    return record.WhichOneof("record_type") == kind


def row(record) -> dict:
    items = record.history.item
    found = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items}
    return found | {"_step": record.history.step.num}


def wandb_records(file: Path) -> Iterator:
    """What wandb keeps offline: records of protobuf, in the blocks of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block, header = file.read_bytes(), 32_768, 7
    assert data[:4] == b":W&B"
    place, whole = header, b""
    while place + header <= len(data):
        if block - place % block < header:
            place += block - place % block
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + header])
        whole += data[place + header : place + header + size]
        place += header + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
