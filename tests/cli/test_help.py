"""Help with an example for every verb; and nothing that only decides or tells imports torch."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

import gpumix
from gpumix.cli import app
from gpumix.train.controller import JobController
from helpers.runs.jobs import EMULATED, PAIR, write_job
from helpers.runs.verbs import heavy_imports
from helpers.runs.verbs import write_job as write_small_job

VERBS = sorted(command.callback.__name__ for command in app.registered_commands)


def test_the_verbs_are_these():
    assert VERBS == [
        "check", "compare", "demo", "devices", "doctor", "export", "init", "inspect", "launch",
        "plan", "profile", "report", "schema", "simulate", "top", "train", "whatif",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example(verb):
    done = CliRunner().invoke(app, [verb, "--help"])
    assert done.exit_code == 0
    assert f"Example: gpumix {verb}" in done.output
    assert "--json" in done.output or verb == "schema"  # which prints nothing else
    assert "--debug" in done.output


def test_help_names_every_verb():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert "..." not in done.output.partition("Commands:")[2]  # each has a line of its own
    for verb in VERBS:
        assert f" {verb} " in done.output


def test_the_version_is_the_packages():
    assert CliRunner().invoke(app, ["--version"]).output == f"gpumix {gpumix.__version__}\n"


# -- what does not import torch --------------------------------------------------------------------


def test_helping_deciding_from_the_cache_and_showing_do_not_import_torch(run, tmp_path):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(EMULATED))
    helps = [("--help",), ("train", "--help"), ("demo", "--help")]
    devices = ("devices", "--cluster", "cluster.yaml")
    few = {"max_pipeline_stages": 1, "tensor_parallel_size": 1, "zero_stages": 3}
    job = write_job(tmp_path, cluster=PAIR, techniques=few)
    JobController.of_file(job, [], debug=False).profile()
    cached = [("plan", "job.yaml"), ("profile", "job.yaml")]
    shown = [("report", "first"), ("top", "first", "--once")]
    found = heavy_imports(tmp_path, *helps, devices, *cached, *shown)
    assert set(map(tuple, found.values())) == {(0,)}, found


def test_what_answers_before_anything_is_there_does_not_import_torch(tmp_path):
    cards = ("--cluster", "rtx3090, p40")
    small, batch = (
        (*cards, "--model", "20M"),
        ("--sequence-length", "512", "--global-batch-size", "4"),
    )
    write_small_job(tmp_path)
    found = heavy_imports(
        tmp_path,
        ("plan", *small, *batch, "--output", "plan.json"),
        ("compare", "job.yaml", *cards),
        ("whatif", "job.yaml", *cards, "--add", "1x p40"),
        ("simulate", "plan.json", *small, "--trace", "t.json"),
    )
    assert set(map(tuple, found.values())) == {(0,)}, found
    assert (tmp_path / "t.json").exists()
