"""Bounds of rows of groups: above no plan that has room, and above what speeds alone tell."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_staged import cluster, with_room, with_split_backward

from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.pipeline_parallel.call_times import CallTimesCache
from gpumix.planner.pipeline_parallel.device_order import list_rows
from gpumix.planner.pipeline_parallel.row_bounds import PlanRange, RowBounds
from gpumix.planner.pipeline_parallel.search import SCHEDULES
from gpumix.planner.pipeline_parallel.stage_cuts import Cutter
from gpumix.planner.pipeline_parallel.stage_modes import NO_TENSOR_PARALLEL, StageModes
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged_below
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Schedule
from gpumix.schema.profile.profile import Profile
from helpers.draws import examples
from helpers.plans.every_stage import steps


def bound_s(
    found: Profile, batch: int, space: Space, below_s: float = float("inf")
) -> tuple[float, float]:
    """Of all rows; and what is told of the devices' speeds alone."""
    pace_of = CallTimesCache(found)
    manners = StageModes({NO_TENSOR_PARALLEL: found}, space)
    interleaved = "interleaved" in space.pipeline_schedules
    assert RowBounds.can_bound(found.model, interleaved=interleaved)
    bounds = RowBounds(
        pace_of, manners, batch, range(1, batch + 1), below_s, interleaved=interleaved
    )
    devices = found.cluster.in_rank_order()
    rows, complete = list_rows(devices, len(devices))
    assert complete
    counts = {d.device_class: 0 for d in devices}
    for device in devices:
        counts[device.device_class] += 1
    ideal_s = Cutter(pace_of, batch).bound_all_plans(counts.items(), manners)
    return bounds.least_s(rows), ideal_s


def assert_never_above(
    schedule: Schedule, zero_stage: int, *, slow: float, link: float, batch: int, full: float
) -> None:
    """Above no plan that has room on devices of so much memory.

    Args:
        full: of all plans, the part that has room.
    """
    calls = 4 if schedule == "interleaved" else 3
    found = cluster([(1e-3, 2), (slow, 1)], calls=calls, link=link, per_host=2)
    found = with_split_backward(found)
    space = Space(zero_stages=zero_stage, pipeline_schedules=schedule, cross_entropy="whole")
    every = sorted(steps(found, batch, space), key=lambda one: one[1])
    part = every[int(full * (len(every) - 1))][1]
    small = with_room(found, part)
    least_s = min(seconds for seconds, filled in every if filled <= part)
    for below_s in (float("inf"), least_s * 1.3, least_s * 0.9):
        told_s, _ = bound_s(small, batch, space, below_s)
        assert told_s <= min(least_s * (1 + 1e-9), below_s)


CASES = [
    ("1f1b", 1, 0.05),
    ("1f1b", 3, 0.05),
    ("eager-1f1b", 2, 0.3),
    ("gpipe", 2, 0.05),
    ("zero-bubble", 0, 0.3),
    ("zero-bubble", 3, 0.05),
    ("interleaved", 1, 0.05),
    ("interleaved", 2, 0.3),
]


@pytest.mark.parametrize(("schedule", "zero_stage", "full"), CASES)
def test_no_plan_with_room_is_faster(schedule, zero_stage, full):
    assert_never_above(schedule, zero_stage, slow=2.2e-3, link=1e6, batch=3, full=full)


@pytest.mark.slow
@examples(3)
@given(
    schedule=st.sampled_from(SCHEDULES),
    zero_stage=st.integers(0, 3),
    slow=st.sampled_from([1e-3, 1.7e-3, 4e-3]),
    link=st.sampled_from([1e5, 1e6, 1e9]),
    batch=st.integers(2, 4),
    full=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
)
def test_no_plan_of_any_kind_with_room_is_faster(schedule, zero_stage, slow, link, batch, full):
    assert_never_above(schedule, zero_stage, slow=slow, link=link, batch=batch, full=full)


def test_it_knows_that_graphs_have_no_room_and_micro_batches_are_whole():
    found = with_split_backward(cluster([(1e-3, 2), (2.2e-3, 1)], calls=4, per_host=2))
    space = Space(zero_stages=(0, 1), pipeline_schedules=("1f1b",), cross_entropy="whole")
    every = steps(found, 3, space)
    small = with_room(found, median(filled for _, filled in every))
    (wide_s, ideal_s), (narrow_s, _) = bound_s(found, 3, space), bound_s(small, 3, space)
    assert ideal_s < wide_s <= narrow_s


def test_a_search_tells_it():
    """Of more ways than are tried one by one."""
    found = with_split_backward(cluster([(1e-3, 2), (2.5e-3, 2)], calls=6, per_host=2))
    small = with_room(found, 1e-4)
    plan, told_s = plan_staged_below(small, PlanRequest(global_batch=8, space=Space()), 1.0)
    assert plan is not None
    rows_s, ideal_s = bound_s(small, 8, Space(), get_prediction(plan).step_s)
    assert ideal_s < rows_s <= told_s <= get_prediction(plan).step_s


def test_a_range_is_parted_into_all_of_its_plans():
    whole = PlanRange(0, None, (1, 6))
    ends, waiting = [], [whole]
    while waiting:
        one = waiting.pop()
        parts = one.parts()
        waiting += parts
        ends += [] if parts else [(one.zero_stage, *one.waves)]
    alone = [(1, 1, 1)]
    assert sorted(ends) == alone + [(z, n, n) for z in (2, 3) for n in range(1, 7)]
