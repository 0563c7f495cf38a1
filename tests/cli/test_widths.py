"""On a terminal of 80 columns no verb's answer is wider, and none draws boxes."""

from __future__ import annotations

import re
import shlex
from contextlib import chdir

import pytest
import yaml
from typer.testing import CliRunner

from gpumix.cli import app
from helpers.runs.jobs import CLUSTER, EMULATED
from helpers.runs.verbs import measured

STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BOXES = re.compile(r"[─-╿]")
WIDTH = 80
SMALL = "--sequence-length 512 --global-batch-size 16"
UNLIKE = "'2x rtx4090, 4x rtx3090, rtx3060'"
COMMANDS = (
    f"plan --cluster {UNLIKE} --model 20M {SMALL} --verbose",
    f"compare --cluster {UNLIKE} --model 20M {SMALL}",
    f"whatif --cluster {UNLIKE} --model 20M {SMALL} --add 2xrtxpro6000-maxq --remove rtx3060",
    f"whatif --cluster {UNLIKE} --model 20M {SMALL} --add t4"
    " --price rtx4090=1.2,rtx3090=1,rtx3060=1 --price t4=0.35",
    f"devices --cluster {UNLIKE}",
    "devices --cluster cpu.yaml",
    "devices --cluster emulated.yaml",
    "simulate first/plan.json",
    "top first --once",
    "inspect --help",
    "train --help",
)


@pytest.fixture
def folder(run, tmp_path):
    """With a run in `first`, and cluster files."""
    measured().save(tmp_path / "profile.json")
    (tmp_path / "cpu.yaml").write_text(yaml.safe_dump(CLUSTER), encoding="utf-8")
    (tmp_path / "emulated.yaml").write_text(yaml.safe_dump(EMULATED), encoding="utf-8")
    return run.parent


@pytest.mark.parametrize("command", COMMANDS)
def test_on_a_terminal_of_80_columns(folder, command):
    terminal = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": str(WIDTH)}
    with chdir(folder):
        done = CliRunner().invoke(app, shlex.split(command), env=terminal)
    assert done.exit_code == 0, done.output
    text = STYLES.sub("", done.stdout)
    assert text.strip()
    wide = [line for line in text.splitlines() if len(line.rstrip()) > WIDTH]
    assert not wide
    assert not BOXES.search(re.sub("[━╸╺]", "", text))  # of a bar of progress
