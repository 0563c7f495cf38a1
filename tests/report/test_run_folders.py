"""A folder that is a run, and one that is none."""

from __future__ import annotations

import json
import os

import pytest

from gpumix.report.run import read_run
from gpumix.schema.errors import InputError
from gpumix.train.run_figures.history import FIGURE_STEPS
from helpers.runs.folders import planned, run_of, step_line, write_run


def refused(folder) -> InputError:
    with pytest.raises(InputError) as caught:
        read_run(folder)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    return caught.value


def test_a_plan_alone_is_enough(tmp_path):
    planned().save(tmp_path / "plan.json")
    found = read_run(tmp_path)
    assert (found.progress.state, found.profile, found.record) == ("planned", None, None)
    assert found.history.steps == () and found.checkpoints == ()


def test_what_gpumix_plan_writes_is_a_planned_run(tmp_path):
    write_run(tmp_path)
    (tmp_path / "profile.json").rename(tmp_path / "plan.profile.json")
    assert read_run(tmp_path).profile is not None


def test_a_profile_of_something_else_is_not_used(tmp_path):
    write_run(tmp_path)
    told = json.loads((tmp_path / "profile.json").read_text())
    told["model"]["fingerprint"] = "another"
    (tmp_path / "profile.json").write_text(json.dumps(told))
    assert read_run(tmp_path).profile is None


def test_who_looks_again_and_again_reads_the_end_of_the_metrics(tmp_path):
    """At least as much of it as the figures are computed of."""
    last = 3 * FIGURE_STEPS
    write_run(tmp_path, [step_line(n) for n in range(1, last + 1)], state="training")
    whole = read_run(tmp_path)
    for least in (10, 2 * FIGURE_STEPS):
        found = read_run(tmp_path, newest_bytes=least * len(step_line(last)))
        assert len(found.history.steps) == pytest.approx(max(least, FIGURE_STEPS), abs=3)
        assert (found.history.steps[-1].step, found.history.unread) == (last, 0)
        assert found.figures.as_dict() == whole.figures.as_dict()


@pytest.mark.parametrize("name", ["nothing", "file", "empty", "measuring", "robbed"])
def test_what_is_no_run_is_said(tmp_path, name):
    if name == "file":
        (tmp_path / name).write_text("x")
    elif name != "nothing":
        (tmp_path / name).mkdir()
    if name in ("measuring", "robbed"):
        (tmp_path / name / ".lock").touch()
    if name == "robbed":  # it has trained: its plan is gone
        (tmp_path / name / "metrics.jsonl").touch()
    error = refused(tmp_path / name)
    assert error.what == "this is no run"
    assert name in error.where
    assert ("measured" in error.why) == (name == "measuring")


def test_the_run_of_a_script_lies_in_its_folder(tmp_path):
    run = write_run(tmp_path / "out" / "gpumix", [step_line(1)], state="finished")
    assert read_run(tmp_path / "out").folder == run
    write_run(tmp_path / "out", state="training")
    assert read_run(tmp_path / "out").folder == tmp_path / "out"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"state": "dancing"}', "[" * 100_000])
def test_progress_that_is_none_is_refused(tmp_path, text):
    write_run(tmp_path)
    (tmp_path / "progress.json").write_text(text)
    assert "progress.json" in refused(tmp_path).where


def test_metrics_that_cannot_be_read_are_refused(tmp_path):
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    assert "metrics.jsonl" in refused(tmp_path).where


@pytest.mark.parametrize(
    "name", ["plan.json", "profile.json", "run.json", "metrics.jsonl", "progress.json"]
)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    write_run(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    error = refused(tmp_path)
    assert name in error.where
    assert error.why == "it is a pipe, not a file"
    assert error.fix


@pytest.mark.parametrize("name", ["plan.json", "run.json"])
def test_a_damaged_file_is_mended_by_the_run_not_by_another_plan(tmp_path, name):
    write_run(tmp_path)
    (tmp_path / name).write_text('{"a')
    error = refused(tmp_path)
    assert name in error.where
    assert "written anew when the run goes on" in error.fix and "gpumix plan" not in error.fix


@pytest.mark.parametrize("step", [None, "three", True, float("nan"), 10**400])
def test_numbers_of_progress_that_are_none_are_not_known(tmp_path, step):
    assert run_of(tmp_path, state="training", loss=step, remaining_s=step).progress.loss is None
