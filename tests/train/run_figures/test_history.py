"""What is read of metrics.jsonl: all that is whole, whatever lies between."""

from __future__ import annotations

import json

import pytest

from gpumix.train.run_figures.history import MOST_WINDOWS, read_history
from helpers.runs.folders import event_line, step_line


def window(step: int, **told: float) -> str:
    return event_line("classes", step, classes=[{"device_class": "fast", **told}])


def test_a_line_that_was_cut_short_is_passed_over():
    lines = [step_line(1), step_line(2), step_line(3)[:40]]
    found = read_history(lines)
    assert [one.step for one in found.steps] == [1, 2]
    assert found.unread == 1


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '"step"',
        "\x00\x01\ufffd",
        "[" * 100_000,
        '{"event": ["step"], "step": 1}',
        '{"event": "step", "step": 1.5, "loss": 2, "step_s": 1}',
        '{"event": "step", "step": -1, "loss": 2, "step_s": 1}',
        '{"event": "step", "step": 1, "loss": NaN, "step_s": 1}',
        '{"event": "step", "step": true, "loss": 2, "step_s": 1}',
        '{"event": "step", "step": 1, "loss": "2", "step_s": 1}',
        '{"event": "step", "step": 1, "loss": 1' + "0" * 400 + ', "step_s": 1}',
        '{"event": "classes", "step": 1, "classes": [1]}',
        '{"event": "evaluation", "step": 1}',
        '{"step": 1}',
    ],
)
def test_what_is_no_record_is_counted(line):
    found = read_history([step_line(1), line, step_line(2)])
    assert ([one.step for one in found.steps], found.unread) == ([1, 2], 1)


def test_older_lines_that_tell_less_are_read():
    found = read_history(['{"event": "step", "step": 4, "loss": 2.5, "step_s": 0.5}'])
    (only,) = found.steps
    assert (only.step, only.loss, only.shares) == (4, 2.5, None)
    told = {"event": "classes", "step": 4, "classes": [{"device_class": "fast", "busy_share": 0.5}]}
    (fast,) = read_history([json.dumps(told)]).classes
    assert (fast.device_class, fast.busy_share, fast.peak_bytes, fast.mfu) == (
        "fast",
        0.5,
        None,
        None,
    )


def test_of_a_step_that_is_there_twice_the_last_counts():
    found = read_history([step_line(1, loss=3.0), step_line(2), step_line(1, loss=2.5)])
    assert [(one.step, one.loss) for one in found.steps] == [(1, 2.5), (2, 2.0)]


@pytest.mark.parametrize("count", [MOST_WINDOWS, MOST_WINDOWS + 1, 3 * MOST_WINDOWS - 1])
def test_of_many_evaluations_the_newest_is_among_those_kept(count):
    found = read_history([event_line("evaluation", n, loss=1.0) for n in range(1, count + 1)])
    assert found.evaluations[-1].step == count
    assert len(found.evaluations) <= MOST_WINDOWS


def test_events_keep_what_they_tell():
    (found,) = read_history([event_line("something new", 3, colour="blue")]).events
    assert (found.event, found.step, found.text("colour")) == ("something new", 3, "blue")
