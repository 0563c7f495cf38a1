"""What the record of another library's loop says of its steps' time, by clocks that tests set."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpumix.engine.comm.process_groups import make_communicator
from gpumix.engine.comm.wait_clock import WaitClock
from gpumix.hardware.timestamps import HostClock
from gpumix.integrations.common import run_recorder
from gpumix.integrations.common.run_recorder import (
    REPORT_INTERVAL_STEPS,
    RunRecorder,
    TrainingRecorder,
)
from gpumix.report.page import render_page
from gpumix.report.run import read_run
from gpumix.train.monitor.step_timer import WINDOW_STEPS, StepTimer
from gpumix.train.run_log import run_files
from gpumix.train.run_log.time_breakdown import TimeShares
from helpers.training.staging import rows, staged_plan

HOST = torch.device("cpu")


class Loop:
    """Somebody's, on one device: what takes how long is its own affair."""

    def __init__(self, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = lambda: self.now  # noqa: E731
        monkeypatch.setattr(run_recorder, "StepTimer", partial(StepTimer, clock=clock))
        monkeypatch.setattr(run_recorder, "make_device_clock", lambda device: HostClock(clock))
        engine: Any = SimpleNamespace(
            comm=make_communicator(HOST),
            plan=staged_plan("gpt2", rows([4])),
            device=HOST,
            copies=WaitClock(HOST),
            losses_counted=torch.tensor(4.0),
            computed=[(4, None)],
            reduction="",
        )
        self.folder, self.steps = folder, 0
        engine.plan.save(folder / run_files.PLAN)
        self.record = RunRecorder(engine, folder, plans="Loop", steps=None, done=0)

    def batches(self, seconds: float) -> Any:
        while True:
            self.now += seconds
            yield 0

    def batch(self, *, waits: float, idles: float, computes: float) -> None:
        self.record.next_of(self.batches(waits))
        self.now += idles
        self.record.computes()
        self.now += computes
        self.record.batch()

    def step(self, *, updates: float) -> None:
        self.now += updates
        self.steps += 1
        loss = torch.tensor(float(self.steps))
        self.record.step(self.steps, loss=loss, learning_rate=0.1, norm=1.0)

    def shares(self) -> list[TimeShares | None]:
        """Of the steps, and of each class in the end."""
        self.record.finish(self.steps)
        history = read_run(self.folder).history
        return [one.shares for one in (*history.steps, *history.classes)]


@pytest.fixture
def loop(tmp_path, monkeypatch) -> Loop:
    return Loop(tmp_path, monkeypatch)


def test_a_step_is_told_when_the_next_one_was_given(loop):
    """On GPUs: what a loss belongs to stays right, and nothing is left out at the end."""
    loop.record._late = True
    for number in range(1, 4):
        loop.batch(waits=1.0, idles=0.0, computes=float(number))
        loop.step(updates=0.0)
        told = read_run(loop.folder).history.steps
        assert [one.step for one in told] == list(range(1, number))
    loop.record.evaluation(3, 0.5)
    steps = read_run(loop.folder).history.steps
    assert [(one.step, one.loss, one.step_s) for one in steps] == [
        (1, 1.0, 2.0), (2, 2.0, 3.0), (3, 3.0, 4.0),
    ]  # fmt: skip
    assert [one.tokens for one in steps] == [48 * n for n in (1, 2, 3)]


def test_a_loop_that_fails_has_told_of_its_last_steps(loop):
    loop.record._late = True
    for _ in range(2):
        loop.batch(waits=1.0, idles=0.0, computes=1.0)
        loop.step(updates=0.0)
    loop.record.fail(ValueError("of the program"))
    assert [one.step for one in read_run(loop.folder).history.steps] == [1, 2]


def test_batches_of_one_step_wait_one_by_one(loop):
    for _ in range(2):
        loop.batch(waits=2.0, idles=1.0, computes=3.0)
    loop.step(updates=4.0)
    expected = TimeShares(
        compute=pytest.approx(10 / 16),
        input=pytest.approx(4 / 16),
        communication=0.0,
        copies=0.0,
        other=pytest.approx(2 / 16),
    )
    assert loop.shares() == [expected, expected]


def test_who_asks_for_two_batches_at_once_waits_for_both(loop):
    loop.record.next_of(loop.batches(3.0))
    loop.batch(waits=3.0, idles=0.0, computes=2.0)
    loop.step(updates=2.0)
    assert loop.shares()[0].input == pytest.approx(0.6)


def test_what_comes_between_steps_is_no_part_of_them(loop):
    loop.record.next_of(loop.batches(50.0))  # for an evaluation
    loop.record.evaluation(0, 1.0)
    loop.batch(waits=0.0, idles=0.0, computes=1.0)
    loop.record.rest()  # the model is evaluated before the optimizer steps
    loop.step(updates=1.0)
    assert loop.shares()[0] == TimeShares(0.0, 0.0, 0.0, 0.0, 1.0)


def test_a_run_says_once_that_it_waits_for_its_data(loop):
    steps = 4 * WINDOW_STEPS
    for _ in range(steps):
        loop.batch(waits=1.0, idles=0.0, computes=3.0)
        loop.step(updates=0.0)
    loop.record.finish(steps)
    run = read_run(loop.folder)
    (event,) = [one for one in run.history.events if one.event == "input-bound"]
    assert event.step == 2 * WINDOW_STEPS
    assert event.told["ranks"][0]["share"] == pytest.approx(0.25)
    assert "25.0% waiting for data" in render_page(run)


def test_the_last_batch_is_followed_by_none(loop):
    assert loop.record.next_of(iter([])) is None
    assert TrainingRecorder().next_of(iter([])) is None
    assert TrainingRecorder().next_of(iter([7])) == 7


def test_a_run_that_ended_early_does_not_promise_more(loop):
    loop.batch(waits=1.0, idles=0.0, computes=3.0)
    loop.step(updates=0.0)
    assert loop.steps < REPORT_INTERVAL_STEPS
    assert "the run has not recorded it yet" in render_page(read_run(loop.folder))
    loop.record.close()
    assert "the run ended before it was recorded" in render_page(read_run(loop.folder))
