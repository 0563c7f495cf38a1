"""Whatever a job file holds, reading it gives a job or an InputError, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpumix.schema.errors import InputError
from gpumix.schema.job.job import Job
from gpumix.schema.reading.read import read_job
from helpers.draws import examples

JOB = """\
# everything a job can say
model:
  config: {model_type: gpt2, n_layer: 2}
  units: [Block]
data:
  text: [a, b/c]
  validation_split: 0.1
tokenizer: bytes
sequence_length: 32
global_batch_size: 8
max_steps: 10
optimizer: {name: adamw, lr: 3e-4, betas: [0.9, 0.95]}
max_grad_norm: null
lr_scheduler: {warmup_steps: 2, type: cosine, min_lr_ratio: 0.1}
precision: fp32
cluster:
  classes:
    fast: {memory: 96 MiB, emulate: 8 GFLOP/s}
    slow: {memory: 48 MiB, emulate: 2 GFLOP/s}
  devices:
    - {class: fast}
    - {class: slow, count: 2, host: b}
    - {class: slow, id: my-slow-one}
output_dir: runs/one
eval_steps: 5
eval_batches: 2
advanced: {profile_budget: 2 min, profile_cache: ~/cache, timeout: 90 s}
"""
ODD = [
    "", " ", "\n", "\t", ":", "- ", "[", "]", "{", "}", ",", "'", '"', "#", "&a ", "*a", "!!int ",
    "? ", "|", ">", "<<: ", "~", "null", "true", "-1", "0", "1e999", ".nan", "-.inf", "0x", "1:30",
    "9" * 400, "9" * 5000, "1e999 GiB", "\0", "\x85", "\u2028", "é", "[[[[", "~x/", "auto", "%",
    "x" * 300,
    '"\\ud800"', '"\\0"', '"\\UFFFFFFFF"', "{a: {b: [c]}}", "count: 99999", "ordinal: 1, ", "---\n",
]  # fmt: skip
MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, len(JOB)),
        st.integers(0, 12),
        st.one_of(st.sampled_from(ODD), st.text(max_size=6)),
    ),
    min_size=1,
    max_size=4,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted(Job.model_fields)
BELOW = ["", ".classes", ".classes.fast", ".classes.fast.memory", ".devices", ".lr", ".betas",
         ".config", ".text", ".profile_budget", ".x", "."]  # fmt: skip
FUZZ = examples(60)


def read(path, *overrides):
    try:
        job = read_job(path, overrides)
    except InputError as error:
        assert error.where, error
        assert "[type=" not in str(error)
        return
    assert Job.model_validate_json(job.model_dump_json()).max_steps == job.max_steps


@pytest.fixture
def path(tmp_path):
    return tmp_path / "job.yaml"


def test_the_job_before_it_is_changed(path):
    path.write_text(JOB)
    assert len(read_job(path).cluster.devices) == 4


@FUZZ
@given(MUTATIONS)
def test_changed_text(path, mutations):
    text = JOB
    for start, length, new in mutations:
        text = text[:start] + new + text[start + length :]
    path.write_bytes(text.encode("utf-8", errors="replace"))
    read(path)


@FUZZ
@given(st.integers(0, JOB.count("\n") - 1), st.sampled_from(ODD))
def test_changed_values(path, line, new):
    lines = JOB.splitlines()
    key, _, _ = lines[line].partition(":")
    lines[line] = f"{key}: {new}"
    path.write_text("\n".join(lines), encoding="utf-8")
    read(path)


@FUZZ
@given(st.sampled_from(FIELDS), st.sampled_from(BELOW), VALUES)
@example("cluster", ".classes.fast.memory", 10**400)
@example("optimizer", ".lr", 10**400)
@example("advanced", ".timeout", 10**400)
@example("max_steps", "", 10**400)
@example("cluster", ".classes.fast.emulate", 10**400)
def test_odd_overrides(path, field, below, value):
    path.write_text(JOB)
    read(path, f"{field}{below}={json.dumps(value)}")


@FUZZ
@given(st.text(max_size=30))
def test_any_override(path, argument):
    path.write_text(JOB)
    read(path, argument)


@FUZZ
@given(st.binary(max_size=40))
def test_any_bytes(path, content):
    path.write_bytes(content)
    read(path)
