"""One step as it is drawn: the simulated one, and the traced one."""

from __future__ import annotations

import pytest

from gpumix.report.step_rows import MOST_BARS, WAITING, Bar, _thin_bars, simulate_rows
from gpumix.simulate.events import simulate
from gpumix.simulate.timeline import compute_utilization
from helpers.runs.folders import planned, run_of


def test_the_simulated_step_is_the_simulators(tmp_path):
    run = run_of(tmp_path)
    assert run.profile is not None
    found, replay = simulate_rows(run.profile, run.plan), simulate(run.profile, run.plan)
    assert found is not None
    assert found.step_s == replay.step_s
    assert [row.device for row in found.rows] == [w.device for w in run.plan.workers]
    busy = {rank: use.busy_s for use in compute_utilization(replay) for rank in use.lane.ranks}
    for rank, row in enumerate(found.rows):
        computed = sum(bar.seconds for bar in row.computes if bar.kind != WAITING)
        assert computed == pytest.approx(busy[rank])
        # At any moment a device computes, or waits.
        assert sum(bar.seconds for bar in row.computes) == pytest.approx(replay.step_s)


def test_a_profile_without_a_device_of_the_plan_tells_nothing(tmp_path):
    run = run_of(tmp_path)
    assert run.profile is not None
    cluster = run.profile.cluster.only({planned().workers[0].device})
    assert simulate_rows(run.profile.model_copy(update={"cluster": cluster}), run.plan) is None


def test_many_bars_are_drawn_by_what_fills_each_place():
    bars = [
        Bar("forward" if number % 3 else "backward", "x", number * 1.0, number + 1.0)
        for number in range(30_000)
    ]
    bars += [Bar(WAITING, "gather", 30_000.0, 60_000.0)]
    found = _thin_bars(bars)
    assert len(found) <= 2 * MOST_BARS
    assert found[-1].kind == WAITING
    assert found[-1].seconds == pytest.approx(30_000, rel=0.01)
    assert found[0].kind == "forward"
    assert (found[0].start_s, found[-1].end_s) == (0.0, pytest.approx(60_000))
