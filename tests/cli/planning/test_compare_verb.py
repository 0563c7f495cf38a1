"""`gpumix compare`: a row for every strategy, and why each lost."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from gpumix.cli import app
from gpumix.planner.plan import STRATEGIES
from helpers.runs.verbs import JOB, write_job

CARDS = "rtx3090, p40"
SMALL = ("--sequence-length", "512", "--global-batch-size", "4")


def compared(*arguments: str, code: int = 0):
    done = CliRunner().invoke(app, ["compare", *arguments])
    assert done.exit_code == code, done.output
    return done


def test_every_strategy_has_its_row():
    found = json.loads(compared("--cluster", CARDS, "--model", "1B", "--json").stdout)
    rows = {row["strategy"]: row for row in found["rows"]}
    assert list(rows) == list(STRATEGIES)
    assert found["best"] == "optimal"
    fastest = rows["optimal"]["step_s"]
    possible = [row["step_s"] for row in rows.values() if row["step_s"] is not None]
    assert all(step_s >= fastest * (1 - 1e-9) for step_s in possible)
    assert rows["even"]["why"].startswith(f"{rows['even']['step_s'] / fastest:.2f} times")
    rooms = {room["device_class"]: room["part"] for room in rows["even"]["head_room"]}
    assert set(rooms) == {"rtx3090", "p40"}
    assert all(0 <= part < 1 for part in rooms.values())


def test_the_page_has_the_answer_first_and_says_why_each_lost():
    shown = compared("--cluster", CARDS, "--model", "1B").stdout
    first, *rest = shown.splitlines()
    assert first.startswith("optimal is fastest: ~")
    assert "estimate from datasheets, ±33%" in shown.partition("\n\n")[0]
    for name in STRATEGIES:
        assert sum(line.startswith(f"{name} ") for line in rest) == 2
    assert "least free memory" in shown
    assert max(map(len, rest)) <= 80


def test_what_is_not_possible_is_a_row_too(tmp_path):
    """A job with a model of 1.9 billion parameters."""
    sizes = {"hidden_size": 2560, "num_hidden_layers": 24, "num_attention_heads": 20}
    config = JOB["model"]["config"] | sizes | {"intermediate_size": 6912}
    job = write_job(tmp_path, model={"config": config})
    shown = compared(str(job), "--cluster", CARDS).stdout
    row = next(line for line in shown.splitlines() if line.startswith("best-subset  "))
    assert "no plan" in row
    assert "best-subset no single device class has room" in " ".join(shown.split())
    assert not re.search(r"\d+ bytes", shown)


def test_nothing_that_fits_is_an_error():
    shown = compared("--cluster", "2x p40", "--model", "70B", *SMALL, code=4).stderr
    assert shown.startswith("gpumix: ")
    assert "short of" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "there is no GPU to plan for"),
        (["--cluster", "4x rtx9999"], "rtx9999"),
        (["--cluster", CARDS, "--global-batch-size", "0"], "global-batch"),
    ],
)
def test_bad_input_is_one_error(arguments, told):
    assert told in compared(*arguments, code=2).output
