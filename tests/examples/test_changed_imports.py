"""Scripts with Trainer, SFTTrainer and Accelerator: with one line changed they train to the same
losses on unlike devices, started as their readers start them."""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path

import pytest

from gpumix.report.page import render_page
from gpumix.report.run import read_run
from gpumix.schema.plan.plan import Plan
from helpers.scripts.changed_imports import (
    BATCH,
    BY_TORCHRUN,
    EXAMPLES,
    REPORTED_STEPS,
    SCRIPTS,
    STEPS,
    Launched,
    launched,
    losses_before,
    trained,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def check(found: Launched, expected: list[float]) -> None:
    assert found.losses == pytest.approx(expected, rel=1e-4)
    first, second = found.samples
    assert first > second and first + second == BATCH


@pytest.mark.parametrize(
    ("name", "further"),
    [
        pytest.param("run_clm", False, id="run_clm"),
        *(
            pytest.param(name, True, marks=pytest.mark.extended, id=f"all of {name}")
            for name in SCRIPTS
        ),
    ],
)
def test_one_line_is_changed_and_the_losses_are_the_same(name, further, tmp_path):
    """`further`: its report is read, and it is started by torchrun, too."""
    expected = losses_before(name, tmp_path)
    assert len(expected) == (REPORTED_STEPS if name == "run_clm" else STEPS)
    found = launched(name, tmp_path)
    check(found, expected)
    if name != "clm_no_trainer":  # a loop of one's own has no folder
        plan = Plan.load(found.output / "gpumix" / "plan.json")
        assert [worker.samples for worker in plan.workers] == found.samples
    if further and name == "run_clm":
        check_report(found)
    if further and name in BY_TORCHRUN:
        check(launched(name, tmp_path, torchrun=True), expected)


def check_report(found: Launched) -> None:
    """The command of its page trains to the same losses, where the page says."""
    run = read_run(found.output / "gpumix")
    assert [window.step for window in run.history.windows] == [10, REPORTED_STEPS]
    assert [one.loss for one in run.history.steps] == pytest.approx(found.losses, abs=1e-4)
    line = re.search(
        rf"gpumix launch .*{EXAMPLES / 'run_clm.py'}.*", html.unescape(render_page(run))
    )[0]
    found.output.rename(found.output.with_name("former"))
    assert Path(run.record.folder) == found.output.parent
    again = trained(shlex.split(line, comments=True), "run_clm", found.output)
    assert again.losses == pytest.approx(found.losses, rel=1e-4)
