"""What is known of a cut without a replay, against the replay; and room for state without any."""

from __future__ import annotations

import numpy as np
import pytest

from gpumix.planner.pipeline_parallel.call_times import CallTimesCache
from gpumix.planner.pipeline_parallel.candidate import UncutCandidate, get_stages_per_group
from gpumix.planner.pipeline_parallel.device_order import list_rows
from gpumix.planner.pipeline_parallel.micro_batch_counts import CandidateEvaluator, CutCandidate
from gpumix.planner.pipeline_parallel.stage_cuts import Cutter
from gpumix.planner.pipeline_parallel.stage_memory import StageMemory
from gpumix.planner.pipeline_parallel.stage_modes import NO_TENSOR_PARALLEL, StageMode, StageModes
from gpumix.schema.cluster.network import Link, Network
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Schedule, ZeroStage
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import ROOT, Profile, UnitTimes
from helpers.extended import left_out
from helpers.plans.profiles import GIB, Card, block, in_a_row, line, profile

BATCH = 6


def mixture(
    slow: tuple[float, float] = (2.3e-3, 4.6e-3), *, trainable: int = 100_000, link: float = 1e7
) -> Profile:
    """Three of two classes, on two hosts, that may keep graphs and split backward passes.

    Args:
        slow: seconds of the slow one's forward and backward passes; 1e-3 and 2e-3 of the others.
        link: bytes a second between hosts.
    """

    def times(forward: float, gradient: float) -> dict[str, UnitTimes]:
        unit = UnitTimes(
            forward=line(forward, forward),
            backward=line(forward + gradient, gradient),
            gradient=line(gradient, gradient / 2),
            inputs=line(gradient / 2, gradient / 4),
            weights=line(gradient / 2, gradient / 4),
        )
        return {"block": unit, ROOT: UnitTimes(forward=line(1e-4), backward=line(forward))}

    found = profile(
        [
            Card("fast", 2, GIB, times(1e-3, 2e-3), per_host=2),
            Card("slow", 1, GIB, times(*slow)),
        ],
        kinds=[
            block(
                trainable=trainable,
                kept=line(1e4),
                gradient=line(1e4),
                backward=line(1e5),
                saved=line(2e4),
                saved_forward=line(1e4),
                saved_backward=line(1e4),
            )
        ],
        links=Network(between=Link.stated(link, 1e-5), inside=Link.stated(1e9, 1e-5)),
    )
    return in_a_row(found, message=line(1e4))


WAYS = [("1f1b", 0), ("1f1b", 3), ("eager-1f1b", 1), ("gpipe", 2)]
OTHERS = [("interleaved", 1), ("zero-bubble", 1)]


SIZES = [(*way, size) for n, way in enumerate([*WAYS, *OTHERS]) for size in ((2, 4)[n % 2], 5)]
FIRST = [("1f1b", 0, 2), ("gpipe", 2, 4), ("zero-bubble", 1, 4)]


@pytest.mark.parametrize(
    ("schedule", "zero_stage", "size"), left_out(SIZES, set(SIZES) - set(FIRST))
)
def test_no_step_is_shorter_than_the_least_time_of_its_cut(schedule, zero_stage, size):
    """Where a smaller micro-batch is left, too."""
    assert _is_least(mixture(), schedule, zero_stage, size) > 2


@pytest.mark.parametrize("schedule", left_out(["1f1b", "gpipe", "interleaved"], ["1f1b", "gpipe"]))
def test_the_first_to_come_and_the_last_to_go_back_may_pass_different_workers(schedule):
    """One is fast forward, another one backward; links take next to no time."""
    found = mixture(slow=(4e-3, 2e-4), trainable=100, link=1e9)
    assert _is_least(found, schedule, 0, 1) > 2


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_devices_of_like_strengths_share_a_step_as_they_are_fast(size):
    """Two fast ones and one that takes 2.3 times as long; no smaller micro-batch is left."""
    found = mixture()
    pace_of, manner = CallTimesCache(found), StageMode(NO_TENSOR_PARALLEL, Mode(recompute=False))
    fast_s = (
        float(pace_of("fast", NO_TENSOR_PARALLEL, manner.mode, (size,)).both_s[0, -1])
        * BATCH
        / size
    )
    expected_s = fast_s / (2 + 1 / 2.3) + found.step_overhead_s
    every, _ = list_rows(found.cluster.in_rank_order(), 3)
    for row in every:
        [least_s] = Cutter(pace_of, BATCH).bound_row(row, (manner,) * len(row), [size])
        assert least_s == pytest.approx(expected_s)


def _is_least(found: Profile, schedule: Schedule, zero_stage: ZeroStage, size: int) -> int:
    """How many candidates were counted, none of which takes less than is told of its cut."""
    pace_of = CallTimesCache(found)
    cutter, manner = Cutter(pace_of, BATCH), StageMode(NO_TENSOR_PARALLEL, Mode(recompute=False))
    every, _ = list_rows(found.cluster.in_rank_order(), 3)
    least_of_all = cutter.bound_all_plans(
        [("fast", 2), ("slow", 1)], StageModes({NO_TENSOR_PARALLEL: found}, Space())
    )
    counted = 0
    for row in every:
        stages = len(row) * get_stages_per_group(schedule)
        if stages > len(found.model.calls):
            continue
        way = UncutCandidate(row, (manner,) * stages, schedule, size)
        [least_of_way] = cutter.bound_row(row, way.manners, [size])
        cuts = cutter.cuts(way)
        least = cutter.least_s(way, cuts, zero_stage)
        for number, least_s in enumerate(least):
            cut = cuts.cut(number)
            assert cutter.bound_cut(way, cut, zero_stage) == least_s >= least_of_all * 0.999
            best, _ = CandidateEvaluator(pace_of, BATCH).best_deal(
                CutCandidate(way, zero_stage, cut), float("inf")
            )
            assert best is not None and best.seconds >= least_s * (1 - 1e-9)
            assert best.seconds >= least_of_way * (1 - 1e-9)
            counted += 1
    return counted


def test_a_unit_that_is_called_twice_counts_once_and_for_nobody_surely():
    found = in_a_row(profile([Card("one", 2, GIB, mixture().classes[0].units)]))
    calls = ("layers.0", "layers.1", "layers.0", "layers.2")
    found = found.model_copy(update={"model": found.model.model_copy(update={"calls": calls})})
    room, begin, end = StageMemory(found), np.array([0, 2]), np.array([2, 4])
    assert list(room.elements(begin, end)) == [2000, 1000]
    assert list(room.count_exclusive_elements(begin, end)) == [1000, 1000]


def test_state_has_room_where_workers_can_divide_it():
    found = in_a_row(profile([Card("one", 2, 20_000_000, mixture().classes[0].units)]))
    room, elements = StageMemory(found), np.array([1e6, 2e6, 3e6])
    assert list(room.fits((("one", 2),), elements, 0)) == [True, False, False]
    assert list(room.fits((("one", 2),), elements, 3)) == [True, True, False]
