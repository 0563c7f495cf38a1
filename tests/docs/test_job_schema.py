"""The JSON Schema of job files takes what gpumix takes, by a validator that is not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gpumix.schema.reading.yaml_locations import load_yaml
from helpers.pages import PAGES, ROOT, blocks

SCHEMA = json.loads((ROOT / "docs" / "job.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)
JOBS = [block for page in PAGES for block in blocks(page) if block.text.startswith("model:")]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
LEAST = """\
model: {config: {model_type: gpt2}}
data: {text: [a.txt]}
sequence_length: 8
global_batch_size: 4
max_steps: 1
"""


def read(text: str, folder: Path) -> Any:
    """A YAML file as gpumix reads it."""
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return load_yaml(path, "job").value


def wrong(value: Any) -> list[str]:
    return [error.json_path for error in VALIDATOR.iter_errors(value)]


def test_it_is_a_schema():
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("block", JOBS, ids=str)
def test_jobs_of_the_pages_are_valid(block, tmp_path):
    assert wrong(read(block.text, tmp_path)) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_jobs_of_the_examples_are_valid(path):
    assert wrong(load_yaml(path, "job").value) == []


@pytest.mark.parametrize(
    "more",
    [
        "advanced: {timeout: 5 min}",
        "torch_compile: on",
        "torch_compile: {fast: true}",
        "precision: {fast: bf16}",
        "techniques: {zero_stages: 3, tensor_parallel_size: [1, 2]}",
        "cluster: cluster.yaml",
        "cluster: [{class: a, memory: 24 GiB, count: 2}]",
        "cluster: {classes: {a: {memory: 1 GiB, emulate: 8 GFLOP/s}}, devices: [{class: a}]}",
        "cluster: {classes: {a: {memory: 9}}, devices: [{class: a}], network: {between: 25GbE}}",
        "max_grad_norm: null",
    ],
)
def test_what_gpumix_takes_is_valid(more, tmp_path):
    assert wrong(read(LEAST + more, tmp_path)) == []


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ("stepz: 3", "$"),
        ("optimizer: {lr: -1}", "$.optimizer.lr"),
        ("optimizer: {name: adan}", "$.optimizer.name"),
        ("advanced: {timeout: soon}", "$.advanced.timeout"),
        ("cluster: [{klass: a, memory: 24 GiB}]", "$.cluster"),
        ("save_total_limit: 0", "$.save_total_limit"),
    ],
)
def test_what_gpumix_refuses_is_not(more, where, tmp_path):
    assert wrong(read(LEAST + more, tmp_path)) == [where]


def test_what_must_be_there_is_asked_for():
    missing = {error.message.split("'")[1] for error in VALIDATOR.iter_errors({})}
    assert missing == {"model", "data", "sequence_length", "global_batch_size", "max_steps"}
