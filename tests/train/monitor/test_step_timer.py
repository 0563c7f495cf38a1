"""What a step is spent on: parts of its time that add up, and a word when it is the loader's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpumix.cost.input_time import MIN_STARVED_SHARE
from gpumix.cost.memory_layout.memory_parts import MEMORY_PARTS, group_by_part
from gpumix.data.workers.autotune import Limit
from gpumix.hardware.timestamps import HostClock
from gpumix.train.monitor.step_timer import WINDOW_STEPS, StarvationDetector, StepTimer
from gpumix.train.run_figures.display import describe_input_bound_ranks
from gpumix.train.run_log.metrics import RankRecord
from gpumix.train.run_log.summary import Summary
from gpumix.train.run_log.time_breakdown import TimeShares
from helpers.runs.jobs import metrics, plan_for, train, write_job


class Times:
    """Clocks that tests set: the host's, the device's, and what the device waited for."""

    host = device = waited = copied = 0.0

    def watch(self) -> StepTimer:
        return StepTimer(
            HostClock(lambda: self.device),
            _Told(self, "waited"),
            _Told(self, "copied"),
            clock=lambda: self.host,
        )

    def passes(self, seconds: float) -> None:
        self.host += seconds
        self.device += seconds

    def batches(self, seconds: float) -> Iterator[int]:
        while True:
            self.passes(seconds)
            yield 0


class _Told:
    def __init__(self, times: Times, name: str) -> None:
        self._times, self._name = times, name

    def mark(self) -> float:
        return getattr(self._times, self._name)

    def at_s(self, mark: float) -> float:
        return mark


def test_the_parts_of_a_step_are_told_apart():
    times = Times()
    watch = times.watch()
    watch.begin()
    watch.next_of(times.batches(2.0))
    times.passes(1.0)  # the loop's own
    watch.computes()
    times.passes(7.0)
    times.waited, times.copied = 3.0, 0.5
    watch.end()
    assert watch.last() == TimeShares(
        compute=0.35, input=0.2, communication=0.3, copies=0.05, other=pytest.approx(0.1)
    )
    watch.begin()
    watch.computes()
    times.passes(10.0)
    watch.end()
    taken = watch.take()
    assert (taken.steps, taken.seconds) == (2, 20.0)
    assert taken.shares().compute == pytest.approx((3.5 + 10.0) / 20)
    assert watch.take().steps == 0


def test_a_wait_that_the_device_does_not_feel_is_none():
    """The host runs ahead: it waits for its data while the device computes the step before."""
    times = Times()
    watch = times.watch()
    watch.begin()
    batches = iter([0])
    times.host += 5.0
    watch.next_of(batches)
    times.device += 0.5  # idle between the last kernel and the next
    watch.computes()
    times.device += 9.5
    watch.end()
    assert watch.last().input == 0.0

    watch.begin()
    watch.next_of(_slow(times))
    times.device += 0.5
    watch.computes()
    times.device += 9.5
    watch.end()
    assert watch.last().input == pytest.approx(0.05)


def _slow(times: Times) -> Iterator[int]:
    times.host += 5.0
    yield 0


@pytest.mark.parametrize("share", [MIN_STARVED_SHARE / 2, MIN_STARVED_SHARE * 2])
def test_two_windows_in_a_row_make_a_finding(share):
    found = StarvationDetector()
    for _ in range(2 * WINDOW_STEPS - 1):
        found.add(1.0, share)
    assert found.share is None
    found.add(1.0, share)
    assert found.share == (pytest.approx(share) if share > MIN_STARVED_SHARE else None)


def test_windows_apart_make_none():
    found = StarvationDetector()
    for _ in range(4):
        for starved in (0.5, 0.0):
            for _ in range(WINDOW_STEPS):
                found.add(1.0, starved)
    assert found.share is None


def starved(share: float | None, limit: Limit) -> RankRecord:
    return RankRecord("", "", 1.0, None, 0, starved_share=share, input_limit=limit)


def test_who_waits_for_data_is_named_and_so_is_what_is_short():
    names = ["one", "two", "three"]
    records = [starved(None, Limit.DEVICE), starved(0.2, Limit.CORES), starved(0.1, Limit.UNKNOWN)]
    assert describe_input_bound_ranks(names, records) == (
        "the run is input-bound: GPUs wait for data, in parts of each step: two 20% (cores: "
        "fetching takes more of them than there are), three 10%"
    )
    assert describe_input_bound_ranks(names[:1], records[:1]) == ""


def slow_job(folder: Path, window_steps: int) -> Path:
    """Of as many steps as four windows have, as one may be disturbed; each sample is waited for."""
    slow = {"factory": "toys:slow_tokens", "arguments": {"window_steps": window_steps}}
    return write_job(
        folder,
        data=slow | {"validation_split": 0.1, "num_workers": 0, "prefetch": 1},
        global_batch_size=2,
        max_steps=4 * window_steps,
        logging_steps=window_steps // 2,
        cluster=[{"class": "big", "accelerator": "cpu", "memory": "64 MiB", "count": 2}],
    )


def check_waits(run: Path, summary: Summary) -> dict[str, Any]:
    """What is told of the only class."""
    for record in metrics(run):
        assert sum(record["shares"].values()) == pytest.approx(1.0)
    for record in metrics(run, "ranks"):
        assert [rank["device_class"] for rank in record["ranks"]] == ["big", "big"]
        for rank in record["ranks"]:
            assert sum(rank["shares"].values()) == pytest.approx(1.0)
    [told] = metrics(run, "input-bound")
    assert {rank["share"] > MIN_STARVED_SHARE for rank in told["ranks"]} == {True}
    assert {rank["limit"] for rank in told["ranks"]} <= set(Limit)
    [of_class] = summary.classes
    assert sum(of_class["shares"].values()) == pytest.approx(1.0)
    assert of_class["shares"]["input"] > MIN_STARVED_SHARE
    return of_class


def test_a_run_says_once_that_it_waits_for_its_data(tmp_path):
    job = slow_job(tmp_path, window_steps=3)
    check_waits(tmp_path / "run", train(job, plan=plan_for(job, (1, 1), (0.5, 0.5))))


@pytest.mark.extended
@pytest.mark.slow
def test_a_planned_run_that_waits_for_its_data_has_the_memory_that_was_planned(tmp_path):
    of_class = check_waits(tmp_path / "run", train(slow_job(tmp_path, WINDOW_STEPS)))
    assert of_class["peak_source"] == "measured"
    assert 0 < of_class["mfu"] <= of_class["hfu"] < 1
    assert of_class["planned_peak_bytes"] == sum(of_class["planned_memory"].values())
    measured, planned = of_class["measured_memory"], group_by_part(of_class["planned_memory"])
    assert sum(measured.values()) == of_class["peak_bytes"]
    for part in MEMORY_PARTS:
        # But for some kB beside: the next batch, the last losses, counters of the optimizer, the
        # samples of a rehearsal.
        assert measured[part] == pytest.approx(planned[part], rel=0.05, abs=2**15), part
    assert set(asdict(TimeShares(1, 0, 0, 0, 0))) == set(of_class["shares"])
