"""Changes of a job file."""

from __future__ import annotations

import os

import pytest
import yaml

from gpumix.doctor.change import (
    describe_changes,
    format_overrides,
    get_default,
    merge_overrides,
    write_tuned,
)
from gpumix.schema.errors import MachineError
from gpumix.schema.reading.read import read_job
from helpers.errors import raises

JOB = """
# a comment
model: {config: {model_type: gpt2}}
data: {text: [.], num_workers: 0}
sequence_length: 8
global_batch_size: 4
max_steps: 10
techniques: {gradient_checkpointing: true}
"""

CHANGES = {
    "data.num_workers": "auto",
    "techniques.gradient_checkpointing": [True, False],
    "data.prefetch": 3,
}


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_a_tuned_file_is_the_job_with_the_changes(job):
    tuned = job.with_name("tuned.yaml")
    write_tuned(job, tuned, CHANGES)
    assert read_job(tuned) == read_job(job, format_overrides(CHANGES))
    assert read_job(job).data.num_workers == 0


def test_a_tuned_file_begins_with_what_comes_with_its_changes(job):
    tuned = job.with_name("tuned.yaml")
    write_tuned(job, tuned, CHANGES, ["`data.prefetch: 3` (takes memory)"])
    first, second, *_ = tuned.read_text().splitlines()
    assert first == "# job.yaml as gpumix doctor would have it"
    assert second == "# `data.prefetch: 3` (takes memory)"


WRITTEN = """# what I think of it
model: {config: {model_type: gpt2}}   # small

data:
  num_workers: 0        # because of the disk
  text:             # all of it
    - .
max_steps: 10
# the batch of the paper
global_batch_size: 4
sequence_length: 8
techniques: {gradient_checkpointing: true}
"""

TUNED = """# job.yaml as gpumix doctor would have it
# what I think of it
model: {config: {model_type: gpt2}}   # small

data:
  num_workers: auto        # because of the disk
  text:             # all of it
    - .
  prefetch: 3
max_steps: 10
# the batch of the paper
global_batch_size: 4
sequence_length: 8
techniques: {gradient_checkpointing: [true, false], max_pipeline_stages: 1}
advanced: {efficiency: {attention: eager}}
"""


def test_a_tuned_file_keeps_comments_and_order(job):
    job.write_text(WRITTEN)
    tuned = job.with_name("tuned.yaml")
    more = {
        "techniques.max_pipeline_stages": 1,
        "advanced.efficiency.attention": "eager",
        "torch_compile": False,
    }
    write_tuned(job, tuned, {**CHANGES, **more})
    assert tuned.read_text() == TUNED


@pytest.mark.parametrize(
    ("written", "changes"),
    [
        ("data:\n  text: [.]\n  num_workers:\n    0\nmax_steps: 1", {"data.num_workers": 2}),
        ("a: &x {b: 1}\nc: *x\n", {"data.num_workers": 2}),
        ("a:\n- b\n- {c: 1}", {"torch_compile": True}),
        ("a: |\n  text\n\n  more\n", {"torch_compile": True}),
        ("{a: 1}", {"torch_compile": True, "data.num_workers": 2}),
        ("data: {}\n", {"data.num_workers": 2, "data.prefetch": 3}),
        ("precision: {a: bf16,\n  b: fp32}\n", {"precision": "fp16"}),
    ],
)
def test_whatever_the_layout_the_values_are_right(job, written, changes):
    job.write_text(written)
    tuned = job.with_name("tuned.yaml")
    write_tuned(job, tuned, changes)
    found, before = yaml.safe_load(tuned.read_text()), yaml.safe_load(written)
    for key, value in changes.items():
        section, _, last = key.rpartition(".")
        assert (found[section] if section else found).pop(last) == value
    for key in before:
        assert (found.get(key) or {}) == (before[key] or {}) or key in changes or key == "data"


def test_changes_in_words():
    assert (
        describe_changes(CHANGES)
        == "no `data.num_workers`, no `techniques.gradient_checkpointing`, `data.prefetch: 3`"
    )


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("strategy", "optimal"),
        ("data.num_workers", "auto"),
        ("techniques.zero_stages", [3, 2, 1, 0]),
    ],
)
def test_defaults(key, default):
    assert get_default(key) == default


SMALL = """model: {config: {model_type: gpt2}}
sequence_length: 8
global_batch_size: 4
max_steps: 10
"""


@pytest.mark.parametrize(
    "more",
    [
        "data: {text: [.]}\neval_steps: &often 10\nsave_steps: *often\n",
        "data: {text: [.], num_workers: &n 2, prefetch: *n}\n",
        "data: {text: [.]}\noutput_dir: 2026-11-26\n",
        "data:\n  text: [größe.txt]  # ✓\n",
        "techniques:\n  gradient_checkpointing:\n  - true\n  - false\ndata: {text: [.]}\n",
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    "changes",
    [
        {"save_steps": 50},
        {"data.num_workers": 4},
        {"techniques.gradient_checkpointing": [False, True]},
    ],
)
def test_nothing_else_changes_however_a_job_is_written(job, more, mark, changes):
    """What stands for several keys is changed for one of them; a mark of its encoding is left
    out."""
    job.write_text(mark + SMALL + more)
    tuned = job.with_name("tuned.yaml")
    write_tuned(job, tuned, changes)
    assert read_job(tuned) == read_job(job, format_overrides(changes))
    assert "\\x" not in tuned.read_text() and "\ufeff" not in tuned.read_text()


def test_a_tuned_file_is_whole_or_not_there(job, monkeypatch):
    tuned = job.with_name("tuned.yaml")
    tuned.write_text("what was there")

    def interrupted(*paths: object, **given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
        patched.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_tuned(job, tuned, CHANGES)
    assert tuned.read_text() == "what was there"
    assert sorted(path.name for path in job.parent.iterdir()) == ["job.yaml", "tuned.yaml"]
    tuned.unlink()
    tuned.mkdir()
    with raises(MachineError, code="file-not-writable", where="tuned.yaml") as caught:
        write_tuned(job, tuned, {"data.num_workers": "auto"})
    assert "--set data.num_workers" in caught.value.fix


@pytest.mark.parametrize(
    ("given", "again"),
    [
        (["max_steps=3"], ["max_steps=3"]),
        (["max_steps=3", "data.num_workers=0", " torch_compile . fast = off"], ["max_steps=3"]),
        (
            ["data={text: [a], num_workers: 0}"],
            ["data={text: [a], num_workers: 0}", "data.num_workers=2"],
        ),
        (["data.num_workers_of=1"], ["data.num_workers_of=1"]),
        ([], []),
    ],
)
def test_what_is_given_again_leaves_the_changes_as_they_are(given, again):
    assert merge_overrides(given, {"data.num_workers": 2, "torch_compile": True}) == again
