"""Changes of a job file."""

from __future__ import annotations

import pytest
import yaml

from gpumix.doctor.change import default_of, in_words, overrides, write_tuned
from gpumix.spec.read import read_job

JOB = """
# a comment
model: {config: {model_type: gpt2}}
data: {text: [.], workers: 0}
sequence_length: 8
global_batch: 4
steps: 10
techniques: {recompute: true}
"""

CHANGES = {"data.workers": "auto", "techniques.recompute": [True, False], "data.prefetch": 3}


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_a_tuned_file_is_the_job_with_the_changes(job):
    tuned = job.with_name("tuned.yaml")
    write_tuned(job, tuned, CHANGES)
    assert read_job(tuned) == read_job(job, overrides(CHANGES))
    assert read_job(job).data.workers == 0


def test_what_becomes_a_default_is_left_out(job):
    tuned = job.with_name("tuned.yaml")
    write_tuned(job, tuned, CHANGES)
    content = yaml.safe_load(tuned.read_text())
    assert content["data"] == {"text": ["."], "prefetch": 3}
    assert "techniques" not in content


def test_changes_in_words():
    assert in_words(CHANGES) == "no `data.workers`, no `techniques.recompute`, `data.prefetch: 3`"


@pytest.mark.parametrize(
    ("key", "default"),
    [("strategy", "optimal"), ("data.workers", "auto"), ("techniques.zero_stages", [3, 2, 1, 0])],
)
def test_defaults(key, default):
    assert default_of(key) == default
