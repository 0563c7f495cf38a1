"""Help with an example for every verb; and nothing that only decides or tells imports torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml
from jobs import EMULATED, environment, train, write_job
from typer.testing import CliRunner

import gpumix
from gpumix.cli import app

VERBS = sorted(command.callback.__name__ for command in app.registered_commands)


def test_the_verbs_are_these():
    assert VERBS == [
        "check", "compare", "demo", "devices", "doctor", "export", "inspect", "launch",
        "plan", "profile", "report", "simulate", "top", "train", "whatif",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example(verb):
    done = CliRunner().invoke(app, [verb, "--help"])
    assert done.exit_code == 0
    assert f"Example: gpumix {verb}" in done.output
    assert "--json" in done.output
    assert "--debug" in done.output


def test_help_names_every_verb():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    for verb in VERBS:
        assert f" {verb} " in done.output


def test_the_version_is_the_packages():
    assert CliRunner().invoke(app, ["--version"]).output == f"gpumix {gpumix.__version__}\n"


# -- what does not import torch --------------------------------------------------------------------


def heavy_imports(folder, *arguments: str) -> set[str]:
    """Which heavy packages a command imports."""
    code = (
        "import sys\n"
        "from gpumix.cli import app\n"
        f"app({list(arguments)!r}, standalone_mode=False)\n"
        "print('heavy:', *{'torch', 'transformers', 'scipy', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | environment(folder),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("demo", "--help")])
def test_help_does_not_import_torch(tmp_path, arguments):
    assert heavy_imports(tmp_path, *arguments) == set()


@pytest.mark.parametrize(
    "arguments", [("plan",), ("compare",), ("whatif", "--add", "1x p40")], ids=lambda a: a[0]
)
def test_what_answers_before_anything_is_there_does_not_import_torch(tmp_path, arguments):
    given = ("--cluster", "rtx3090, p40", "--model", "300M")
    assert heavy_imports(tmp_path, *arguments, *given) == set()


def test_devices_do_not_import_torch(tmp_path):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(EMULATED))
    assert heavy_imports(tmp_path, "devices", "--cluster", "cluster.yaml") == set()


def test_planning_from_the_cache_does_not_import_torch(tmp_path):
    train(write_job(tmp_path), "steps=1")
    assert heavy_imports(tmp_path, "plan", "job.yaml") == set()
    assert heavy_imports(tmp_path, "profile", "job.yaml") == set()


@pytest.mark.parametrize("model", [(), ("--model", "3B")])
def test_simulating_an_estimate_does_not_import_torch(tmp_path, model):
    cards = ("--cluster", "2x rtx3090, p40", *model)
    assert heavy_imports(tmp_path, "plan", *cards, "--output", "plan.json") == set()
    assert heavy_imports(tmp_path, "simulate", "plan.json", *cards, "--trace", "t.json") == set()
    assert (tmp_path / "t.json").exists()


@pytest.mark.parametrize("arguments", [("report", "first"), ("top", "first", "--once")])
def test_showing_a_run_does_not_import_torch(run, tmp_path, arguments):
    assert heavy_imports(tmp_path, *arguments) == set()
