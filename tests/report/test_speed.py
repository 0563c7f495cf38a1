"""The answer: each number is that of the run or the plan, and says which it is."""

from __future__ import annotations

import pytest

from gpumix.report.run import read_run
from gpumix.report.speed import compute_run_speeds
from helpers.runs.folders import BATCH, STEP_S, event_line, planned, run_of, step_line

LINES = [step_line(n) for n in range(1, 6)]


def even_step_s() -> float:
    reasons = planned().reasons
    assert reasons is not None
    (found,) = (a.step_s for a in reasons.alternatives if a.strategy == "even")
    assert found is not None
    return found


def test_of_a_plan_alone_it_is_the_predicted_one(tmp_path):
    found = compute_run_speeds(run_of(tmp_path))
    expected = planned().prediction
    assert expected is not None
    assert (found.best.source, found.measured.step_s) == ("predicted", None)
    assert found.best.step_s == expected.step_s
    assert found.best.tokens_per_s == pytest.approx(expected.tokens_per_s)


def test_the_even_split_is_that_which_the_plan_was_weighed_against(tmp_path):
    found = compute_run_speeds(run_of(tmp_path, LINES, state="training"))
    assert found.even.source == "predicted"
    assert found.even.step_s == even_step_s()
    # Its prediction is compared with one: a measured step may be slow for the machine is busy.
    assert found.predicted.step_s != STEP_S
    assert found.speedup_over_even == pytest.approx(even_step_s() / found.predicted.step_s)


def test_an_even_split_that_was_measured_goes_before(tmp_path):
    told = event_line("compared", 5, strategy="even", steps=5, step_s=2.0, tokens_per_s=1.0)
    found = compute_run_speeds(run_of(tmp_path, [*LINES, told], state="finished"))
    assert (found.even.source, found.even.step_s) == ("measured", 2.0)
    assert found.speedup_over_even == pytest.approx(2.0 / STEP_S)
    tokens = BATCH * planned().sequence_length
    assert found.even.tokens_per_s == pytest.approx(tokens / 2.0)


def test_what_is_not_known_says_why(tmp_path):
    plan = planned().model_copy(update={"prediction": None, "reasons": None})
    run = run_of(tmp_path, plan=plan)
    (tmp_path / "profile.json").unlink()
    found = compute_run_speeds(read_run(run.folder))
    for speed in (found.measured, found.predicted, found.even, found.ideal):
        assert not speed and speed.tokens_per_s is None
        assert speed.why
    assert (found.speedup_over_even, found.fraction_of_ideal) == (None, None)


def test_no_plan_is_faster_than_the_ideal(tmp_path):
    found = compute_run_speeds(run_of(tmp_path))
    assert found.fraction_of_ideal is not None
    assert 0 < found.fraction_of_ideal <= 1
