"""Figures of a run: which steps count, and how windows of classes are combined."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from gpumix.schema.plan.plan import Plan
from gpumix.train.run_figures import history as history_module
from gpumix.train.run_figures.figures import RunFigures, select_counted_steps
from gpumix.train.run_figures.history import FIGURE_STEPS, read_history
from gpumix.train.run_figures.terminal_parts import render_summary
from gpumix.train.run_figures.writer import RunLog
from gpumix.train.run_log.metrics import ClassRecord, StepRecord
from gpumix.train.run_log.time_breakdown import TimeShares
from helpers.runs.folders import event_line, planned, step_line


def window(step: int, **told: float) -> str:
    return event_line("classes", step, classes=[{"device_class": "fast", **told}])


def figures_of(lines: list[str], steps: int | None = None) -> RunFigures:
    return RunFigures(read_history(lines), planned(), steps)


def counted(lines: list[str]) -> list[int]:
    return [one.step for one in select_counted_steps(read_history(lines))]


@pytest.mark.parametrize("started", ["restart", "resume"])
def test_the_first_steps_after_each_start_do_not_count(started):
    lines = [step_line(n, step_s=9.0 if n in (1, 2, 5, 6) else 0.5) for n in range(1, 9)]
    again = {"resumed_from": 4, "why": "killed", "seconds": 3.0} if started == "restart" else {}
    lines.insert(5, event_line(started, 5 if again else 4, **again))
    assert counted(lines) == [3, 4, 7, 8]
    assert figures_of(lines).step_s == 0.5


def test_steps_with_batches_of_another_size_do_not_count():
    """A run that went on with batches half as large, which take half as long."""
    lines = [step_line(n, step_s=1.0, samples=16) for n in range(1, 9)]
    lines += [window(8, busy_share=0.2, peak_bytes=9, overruns=1)]
    lines += [step_line(n, step_s=0.5, samples=8) for n in range(9, 13)]
    found = figures_of(lines)
    assert counted(lines) == [11, 12]
    assert found.step_s == 0.5
    assert found.tokens_per_s == pytest.approx(8 * planned().sequence_length / 0.5)
    (fast,) = found.classes  # nothing else is known of it yet
    assert (fast.busy_share, fast.peak_bytes) == (0.2, 9)
    (fast,) = figures_of([*lines, window(12, busy_share=0.6, peak_bytes=5, overruns=2)]).classes
    assert (fast.busy_share, fast.peak_bytes, fast.overruns) == (0.6, 5, 2)


def test_steps_by_the_plan_of_an_earlier_start_do_not_count():
    """A run that went on with the same batches on other devices; rebalancing changes nothing."""
    lines = [step_line(n, step_s=1.0) for n in range(1, 9)]
    lines += [window(8, busy_share=0.2), event_line("plan", 8, live=False)]
    assert figures_of(lines).step_s == 1.0  # nothing else is known yet
    lines += [step_line(n, step_s=0.5) for n in range(9, 12)]
    lines += [event_line("plan", 11, live=True), step_line(12, step_s=0.5)]
    lines += [window(12, busy_share=0.6)]
    found = figures_of(lines)
    assert counted(lines) == [11, 12]
    assert found.step_s == 0.5
    (fast,) = found.classes
    assert fast.busy_share == 0.6


def test_all_steps_count_where_there_are_no_others():
    assert figures_of([step_line(1, step_s=9.0)]).step_s == 9.0
    empty = figures_of([])
    assert (empty.step_s, empty.tokens_per_s, empty.remaining_s, empty.classes) == (
        None, None, None, (),
    )  # fmt: skip


def test_the_newest_steps_count():
    lines = [step_line(n, step_s=9.0) for n in range(1, 201)]
    lines += [step_line(n, step_s=0.5) for n in range(201, 201 + FIGURE_STEPS)]
    assert counted(lines)[0] == 201
    assert figures_of(lines).counted_steps == FIGURE_STEPS


def test_time_remains_for_the_steps_still_to_do():
    lines = [step_line(n, step_s=0.5) for n in range(1, 7)]
    assert figures_of(lines, 10).remaining_s == 4 * 0.5
    assert figures_of(lines).remaining_s is None
    assert figures_of(lines, 6).remaining_s == 0


def test_how_much_slower_than_planned():
    prediction = planned().prediction
    assert prediction is not None
    lines = [step_line(n, step_s=1.77 * prediction.step_s) for n in range(1, 7)]
    assert figures_of(lines).slower_than_planned == pytest.approx(0.77)
    bare = planned().model_copy(update={"prediction": None, "reasons": None})
    assert RunFigures(read_history(lines), bare).slower_than_planned is None


# -- classes ---------------------------------------------------------------------------------------


def steps(count: int) -> list[str]:
    return [step_line(n) for n in range(1, count + 1)]


def test_means_over_windows_are_by_the_steps_that_count():
    """The first two of the first window do not."""
    lines = [*steps(40), window(10, busy_share=0.5), window(40, busy_share=0.9)]
    (fast,) = figures_of(lines).classes
    assert fast.busy_share == pytest.approx((8 * 0.5 + 30 * 0.9) / 38)


def test_rates_are_those_of_the_median_step():
    """Steps of the first window take twice as long; MFU follows the run's tokens/s."""
    lines = [step_line(n, step_s=1.0 if n <= 6 else 0.5) for n in range(1, 25)]
    told = [window(6, mfu=0.2, tokens_per_s=100.0), window(24, mfu=0.4, tokens_per_s=200.0)]
    found = figures_of([*lines, *told])
    (fast,) = found.classes
    assert found.step_s == 0.5
    assert (fast.mfu, fast.tokens_per_s) == (pytest.approx(0.4), pytest.approx(200.0))


def test_a_window_of_first_steps_alone_does_not_count():
    lines = [*steps(6), window(2, busy_share=0.1, peak_bytes=9), window(6, busy_share=0.9)]
    (fast,) = figures_of(lines).classes
    assert (fast.busy_share, fast.peak_bytes) == (0.9, 9)  # a peak is one at any time


def test_without_a_window_of_the_steps_that_count_the_last_one_is_told():
    lines = [*steps(40), window(20, mfu=0.5), window(40, mfu=0.9)]
    later = [step_line(n) for n in range(41, 41 + FIGURE_STEPS)]
    (fast,) = figures_of([*lines, *later]).classes
    assert fast.mfu == 0.9


def test_peaks_are_the_highest():
    lines = [*steps(40), window(10, peak_bytes=7), window(40, peak_bytes=5)]
    (fast,) = figures_of(lines).classes
    assert fast.peak_bytes == 7


def test_counters_are_those_since_the_last_start():
    """An allocator's reserved memory is the most of all."""
    lines = steps(40) + [
        window(n, retries=told, overruns=2 * told, reserved_bytes=held)
        for n, told, held in ((10, 1, 7), (20, 3, 9), (30, 2, 8), (40, 2, None))
    ]
    (fast,) = figures_of(lines).classes
    assert (fast.retries, fast.overruns, fast.reserved_bytes) == (2, 4, 9)


# -- the same for all readers ----------------------------------------------------------------------


def record(step: int, step_s: float) -> StepRecord:
    return StepRecord(
        step=step, loss=1.0, learning_rate=0.1, gradient_norm=1.0, step_s=step_s,
        tokens_per_s=64 / step_s, tokens=64 * step, samples=8,
    )  # fmt: skip


def tell(log: RunLog, numbers: range) -> None:
    for n in numbers:
        log.step(record(n, 0.5 + n % 7 / 100))
        if n % 10 == 0:
            shares = TimeShares(0.5 + n % 30 / 100, 0.1, 0.2, 0.1, 0.1)
            told = ClassRecord(
                "fast", 1, 8, shares.compute, 9, 9, 0, shares=shares, tokens_per_s=n, mfu=n / 1e4
            )
            log.classes(n, [told])


def check_equal(found: RunFigures, other: RunFigures) -> None:
    assert found.as_dict() == other.as_dict()
    assert found.classes == other.classes


@pytest.mark.parametrize("last", [3, 12, 95, 3 * FIGURE_STEPS + 5])
def test_the_run_itself_and_its_readers_compute_the_same(tmp_path, last):
    """Also one that reads the end of the file alone."""
    with RunLog(tmp_path, planned(), 2000) as log:
        tell(log, range(1, last + 1))
        for newest_bytes in (None, 1):
            history = history_module.load_history(tmp_path, newest_bytes=newest_bytes)
            check_equal(RunFigures(history, planned(), 2000), log.figures)
        told = json.loads((tmp_path / "progress.json").read_text())
    assert {name: told[name] for name in log.figures.as_dict()} == log.figures.as_dict()


def test_a_run_that_goes_on_remembers_its_steps(tmp_path):
    with RunLog(tmp_path, planned(), 100) as log:
        tell(log, range(1, 48))
    with RunLog(tmp_path, planned(), 100, done=40) as log:
        tell(log, range(41, 78))
        history = history_module.load_history(tmp_path)
        check_equal(RunFigures(history, planned(), 100), log.figures)


def test_a_thinned_history_has_the_same_figures(monkeypatch):
    lines: list[str] = []
    for n in range(1, 2001):
        lines.append(step_line(n, step_s=0.5 + n % 7 / 100))
        lines += [window(n, busy_share=n % 10 / 10)] if n % 2 == 0 else []
    whole = figures_of(lines, 3000)
    monkeypatch.setattr(history_module, "MOST_STEPS", 100)
    monkeypatch.setattr(history_module, "MOST_WINDOWS", 350)
    thinned = read_history(lines)
    assert thinned.every > 1 and len(thinned.windows) < 1000
    check_equal(RunFigures(thinned, planned(), 3000), whole)


def test_the_newest_figures_are_told_for_trackers(tmp_path):
    with RunLog(tmp_path, planned(), 100) as log:
        tell(log, range(1, 41))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    told = [one for line in lines if (one := json.loads(line))["event"] == "run"]
    assert [one["step"] for one in told] == [10, 20, 30, 40]
    assert {name: told[-1][name] for name in log.figures.as_dict()} == log.figures.as_dict()
    assert read_history(lines).events == ()


def test_the_plan_now_is_the_plan_with_the_last_split():
    plan: Plan = planned()
    before = {worker.device: worker.samples for worker in plan.workers}
    first, *others = before
    now = {first: plan.global_batch - len(others)} | dict.fromkeys(others, 1)
    shares = {worker.device: worker.state_share for worker in plan.workers}
    split = event_line("plan", 3, live=True, samples=now, shares=shares)
    found = figures_of([split])
    assert {w.device: w.samples for w in found.plan_now.workers} == now
    assert figures_of([split, event_line("plan", 5, live=False)]).plan_now == plan


# -- the end of a run, in a terminal ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "note"),
    [
        (200, "MFU: the part of the peak FLOP/s (fast measured); HFU also counts recomputing"),
        (80, "MFU: the part of the peak FLOP/s (fast measured)"),
        (40, ""),
    ],
)
def test_notes_are_about_columns_that_are_shown(width, note):
    told = window(40, mfu=0.4, hfu=0.5, peak_source="measured", busy_share=0.9)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_summary(figures_of([*steps(40), told]), [], width))
    text = console.export_text()
    for column in ("MFU", "HFU"):
        assert any(column in line.split() for line in text.splitlines()) == (column in note)
    assert [line.strip() for line in text.splitlines() if "peak FLOP/s" in line] == [note] * bool(
        note
    )
