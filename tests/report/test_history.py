"""What is read of metrics.jsonl: all that is whole, whatever lies between."""

from __future__ import annotations

import json

import pytest
from folders import event_line, planned, step_line

from gpumix.report.history import MOST_WINDOWS, read_history


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


def test_the_first_steps_after_each_start_do_not_count_for_speed():
    lines = [step_line(n, step_s=9.0 if n in (1, 2, 5, 6) else 0.5) for n in range(1, 9)]
    lines.insert(5, event_line("restart", 5, resumed_from=4, why="killed", seconds=3.0))
    found = read_history(lines)
    assert [one.step for one in found.counted()] == [3, 4, 7, 8]
    assert found.step_s == 0.5


def test_steps_with_batches_of_another_size_do_not_count():
    """A run that went on with batches half as large, which take half as long."""
    lines = [step_line(n, step_s=1.0, samples=16) for n in range(1, 9)]
    lines += [window(8, busy_share=0.2, peak_bytes=9, overruns=1)]
    lines += [step_line(n, step_s=0.5, samples=8) for n in range(9, 13)]
    found = read_history(lines)
    assert [one.step for one in found.counted()] == [11, 12]
    assert found.step_s == 0.5
    assert found.tokens_per_s == pytest.approx(8 * planned().sequence_length / 0.5)
    (fast,) = found.over_all()  # nothing else is known of it yet
    assert (fast.busy_share, fast.peak_bytes) == (0.2, 9)
    (fast,) = read_history([*lines, window(12, busy_share=0.6, peak_bytes=5)]).over_all()
    assert (fast.busy_share, fast.peak_bytes, fast.overruns) == (0.6, 5, 1)


def test_steps_by_the_plan_of_an_earlier_start_do_not_count():
    """A run that went on with the same batches on other devices; splits anew make no difference."""
    lines = [step_line(n, step_s=1.0) for n in range(1, 9)]
    lines += [window(8, busy_share=0.2), event_line("plan", 8, live=False)]
    assert read_history(lines).step_s == 1.0  # nothing else is known yet
    lines += [step_line(n, step_s=0.5) for n in range(9, 12)]
    lines += [event_line("plan", 11, live=True), step_line(12, step_s=0.5)]
    found = read_history([*lines, window(12, busy_share=0.6)])
    assert [one.step for one in found.counted()] == [11, 12]
    assert found.step_s == 0.5
    (fast,) = found.over_all()
    assert fast.busy_share == 0.6


def test_all_steps_count_where_there_are_no_others():
    assert read_history([step_line(1, step_s=9.0)]).step_s == 9.0
    assert read_history([]).step_s is None


def test_means_over_windows_are_by_their_steps():
    (fast,) = read_history([window(10, busy_share=0.5), window(40, busy_share=0.9)]).over_all()
    assert fast.busy_share == pytest.approx((10 * 0.5 + 30 * 0.9) / 40)


@pytest.mark.parametrize("count", [MOST_WINDOWS, MOST_WINDOWS + 1, 3 * MOST_WINDOWS - 1])
def test_of_many_evaluations_the_newest_is_among_those_kept(count):
    found = read_history([event_line("evaluation", n, loss=1.0) for n in range(1, count + 1)])
    assert found.evaluations[-1].step == count
    assert len(found.evaluations) <= MOST_WINDOWS


def test_peaks_are_the_highest():
    (fast,) = read_history([window(10, peak_bytes=7), window(40, peak_bytes=5)]).over_all()
    assert fast.peak_bytes == 7


def test_retries_of_allocators_are_those_of_all_starts():
    """Each start counts from 0; the memory that an allocator held is the most of all."""
    lines = [
        window(n, retries=told, reserved_bytes=held)
        for n, told, held in ((10, 1, 7), (20, 3, 9), (30, 2, 8), (40, 2, None))
    ]
    (fast, *_) = read_history(lines).over_all()
    assert fast.retries == 3 + 2
    assert fast.reserved_bytes == 9


def test_overruns_are_told_since_the_last_start():
    """So many by then: 1, 3, and after another start 2, 2."""
    lines = [window(n, overruns=told) for n, told in ((10, 1), (20, 3), (30, 2), (40, 2))]
    (fast,) = read_history(lines).over_all()
    assert fast.overruns == 3 + 2


def test_events_keep_what_they_tell():
    (found,) = read_history([event_line("something new", 3, colour="blue")]).events
    assert (found.event, found.step, found.text("colour")) == ("something new", 3, "blue")
