"""Trackers in a job: a name, a list of names, or settings by name; local unless they say more."""

from __future__ import annotations

import pytest

from gpumix.schema.errors import InputError
from gpumix.schema.job.job import Job
from gpumix.schema.job.trackers import (
    MlflowSpec,
    PrometheusSpec,
    TensorBoardSpec,
    Trackers,
    WandbSpec,
)
from gpumix.schema.reading.read import read_job

JOB = """
model: {factory: mine:model}
data: {factory: mine:data}
sequence_length: 8
global_batch: 8
steps: 3
"""


@pytest.fixture
def read(tmp_path):
    """The job of these lines more, read."""

    def job_of(lines: str = "", *overrides: str) -> Job:
        path = tmp_path / "job.yaml"
        path.write_text(JOB + lines)
        return read_job(path, overrides)

    return job_of


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", {}),
        ("trackers: wandb", {"wandb": WandbSpec()}),
        ("trackers: [mlflow, wandb]", {"wandb": WandbSpec(), "mlflow": MlflowSpec()}),
        ("trackers: {wandb: , mlflow: {}}", {"wandb": WandbSpec(), "mlflow": MlflowSpec()}),
        ("trackers: {wandb: {project: mine}}", {"wandb": WandbSpec(project="mine")}),
        ("trackers: []", {}),
    ],
)
def test_a_name_names_or_settings(read, lines, expected):
    assert read(lines).trackers.named() == expected


def test_from_the_command_line(read):
    assert list(read("", "report_to=tensorboard").trackers.named()) == ["tensorboard"]
    assert list(read("", "report_to=[trackio,wandb]").trackers.named()) == ["wandb", "trackio"]
    assert read("trackers: wandb", "report_to=").trackers.named() == {}
    found = read("trackers: {prometheus: {}}", "report_to.prometheus.port=0").trackers.named()
    assert found == {"prometheus": PrometheusSpec(port=0)}


def test_paths_start_at_the_job(read, tmp_path):
    found = read("trackers: {tensorboard: {folder: all}}").trackers.named()
    assert found == {"tensorboard": TensorBoardSpec(folder=tmp_path / "all")}


def test_a_job_that_is_passed_on_has_the_same_trackers(read):
    """Those that are left out do not come to be there by their defaults."""
    job = read("trackers: {wandb: {tags: [a, b]}, tensorboard: }")
    assert Job.model_validate_json(job.model_dump_json()) == job


def test_all_stay_on_this_machine_by_default():
    every = Trackers.model_validate({name: {} for name in Trackers.model_fields}).named()
    assert every["wandb"].mode == "offline"
    assert every["mlflow"].uri is None
    assert (every["trackio"].space, every["trackio"].server) == (None, None)
    assert every["prometheus"].address == "127.0.0.1"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("trackers: tensorbord", "there is no tracker 'tensorbord'; there are tensorboard, wandb,"),
        ("trackers: [wandb, wandb]", "'wandb' is named twice"),
        ("trackers: 3", "give a name, a list of names, or settings by name"),
        ("trackers: {tensorbord: {}}", "did you mean 'tensorboard'?"),
        ("trackers: {wandb: {projekt: x}}", "did you mean 'project'?"),
        ("trackers: {wandb: on}", "'trackers.wandb' must be a mapping, it is true"),
        ("trackers: {wandb: {mode: away}}", "must be 'offline' or 'online'"),
        ("trackers: {wandb: {name: ''}}", "of length 1 or more"),
        ("trackers: {tensorboard: {name: x}}", "'name' has no effect without 'folder'"),
        ("trackers: {prometheus: {port: 65536}}", "must be 65535 or less"),
        ("trackers: {prometheus: {textfile: a.txt}}", "reads files that end in .prom"),
        ("trackers: {prometheus: {textfile: a.prom, port: 1}}", "'port' have no effect"),
        ("trackers: {trackio: {space: a/b, server: 'http://x'}}", "at most one of 'space'"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(read, lines, told):
    with pytest.raises(InputError) as caught:
        read(lines)
    assert told in str(caught.value)
    assert "job.yaml:7" in caught.value.where
