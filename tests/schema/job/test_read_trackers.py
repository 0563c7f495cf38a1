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
global_batch_size: 8
max_steps: 3
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
        ("report_to: wandb", {"wandb": WandbSpec()}),
        ("report_to: [mlflow, wandb]", {"wandb": WandbSpec(), "mlflow": MlflowSpec()}),
        ("report_to: {wandb: , mlflow: {}}", {"wandb": WandbSpec(), "mlflow": MlflowSpec()}),
        ("report_to: {wandb: {project: mine}}", {"wandb": WandbSpec(project="mine")}),
        ("report_to: []", {}),
    ],
)
def test_a_name_names_or_settings(read, lines, expected):
    assert read(lines).report_to.named() == expected


def test_from_the_command_line(read):
    assert list(read("", "report_to=tensorboard").report_to.named()) == ["tensorboard"]
    assert list(read("", "report_to=[trackio,wandb]").report_to.named()) == ["wandb", "trackio"]
    assert read("report_to: wandb", "report_to=").report_to.named() == {}
    found = read("report_to: {prometheus: {}}", "report_to.prometheus.port=0").report_to.named()
    assert found == {"prometheus": PrometheusSpec(port=0)}


def test_paths_start_at_the_job(read, tmp_path):
    found = read("report_to: {tensorboard: {folder: all}}").report_to.named()
    assert found == {"tensorboard": TensorBoardSpec(folder=tmp_path / "all")}


def test_a_job_that_is_passed_on_has_the_same_trackers(read):
    """Those that are left out do not come to be there by their defaults."""
    job = read("report_to: {wandb: {tags: [a, b]}, tensorboard: }")
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
        (
            "report_to: tensorbord",
            "there is no tracker 'tensorbord'; there are tensorboard, wandb,",
        ),
        ("report_to: [wandb, wandb]", "'wandb' is named twice"),
        ("report_to: 3", "give a name, a list of names, or settings by name"),
        ("report_to: {tensorbord: {}}", "did you mean 'tensorboard'?"),
        ("report_to: {wandb: {projekt: x}}", "did you mean 'project'?"),
        ("report_to: {wandb: on}", "'report_to.wandb' must be a mapping, it is true"),
        ("report_to: {wandb: {mode: away}}", "must be 'offline' or 'online'"),
        ("report_to: {wandb: {name: ''}}", "of length 1 or more"),
        ("report_to: {tensorboard: {name: x}}", "'name' has no effect without 'folder'"),
        ("report_to: {prometheus: {port: 65536}}", "must be 65535 or less"),
        ("report_to: {prometheus: {textfile: a.txt}}", "reads files that end in .prom"),
        ("report_to: {prometheus: {textfile: a.prom, port: 1}}", "'port' have no effect"),
        ("report_to: {trackio: {space: a/b, server: 'http://x'}}", "at most one of 'space'"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(read, lines, told):
    with pytest.raises(InputError) as caught:
        read(lines)
    assert told in str(caught.value)
    assert "job.yaml:7" in caught.value.where
