"""Estimates of plans of several stages, against exact counts; and what makes rows the same."""

from __future__ import annotations

import pytest

from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.pipeline_parallel.call_times import CallTimesCache
from gpumix.planner.pipeline_parallel.device_order import list_rows
from gpumix.planner.pipeline_parallel.micro_batch_counts import CandidateEvaluator
from gpumix.planner.pipeline_parallel.pipeline_estimate import PipelineEstimates
from gpumix.planner.pipeline_parallel.stage_modes import StageModes
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged
from gpumix.schema.cluster.network import Link
from gpumix.schema.cluster.network import Network as StatedNetwork
from gpumix.schema.job.search_space import Space
from gpumix.schema.profile.profile import ROOT, Profile, UnitTimes
from helpers.extended import left_out
from helpers.plans.profiles import GIB, MIB, Card, block, in_a_row, line, profile


def times(seconds: float) -> dict[str, UnitTimes]:
    unit = UnitTimes(
        forward=line(seconds, 0.3 * seconds),
        backward=line(3 * seconds, 0.9 * seconds),
        gradient=line(2 * seconds, 0.6 * seconds),
        inputs=line(seconds, 0.3 * seconds),
        weights=line(seconds, 0.3 * seconds),
    )
    return {"block": unit, ROOT: UnitTimes(forward=line(0.0), backward=line(0.0))}


def cluster(
    cards: list[tuple[float, int]], *, calls: int = 8, link: float = 1e9, gib: float = 16
) -> Profile:
    """Cards by seconds of a sample and their number, two on a host."""
    found = profile(
        [
            Card(f"c{n}", count, int(gib * GIB), times(s), per_host=2)
            for n, (s, count) in enumerate(cards)
        ],
        calls=("block",) * calls,
        kinds=[
            block(
                trainable=10_000_000,
                kept=line(3 * MIB),
                saved=line(60 * MIB),
                saved_forward=line(20 * MIB),
                saved_backward=line(30 * MIB),
                gradient=line(3 * MIB),
                backward=line(60 * MIB),
            )
        ],
        links=StatedNetwork(inside=Link.stated(16e9, 5e-6), between=Link.stated(link, 3e-5)),
    )
    return in_a_row(found, message=line(3 * MIB))


def estimated(found: Profile, batch: int, schedule: str = "1f1b", space: Space | None = None):
    """Estimates of all rows at ZeRO stages 0 and 1, in seconds, with the exact plans of those that
    fit."""
    space = space or Space(zero_stages=(0, 1), cross_entropy="whole")
    pace_of = CallTimesCache(found)
    estimates = PipelineEstimates(pace_of, StageModes(pace_of.profiles, space), batch, [1, 2, 4])
    every, _ = list_rows(found.cluster.in_rank_order(), 4)
    for row in every:
        for zero_stage in space.zero_stages:
            for number in range(3):
                of_row = estimates.of(row)
                candidate = of_row.candidate(zero_stage, schedule, 0, number)
                if candidate is None:
                    continue
                counting = CandidateEvaluator(pace_of, batch)
                exact = counting.best(candidate, float("inf"))
                yield float(of_row.divided(zero_stage, schedule, 0).seconds[number]), exact


SCHEDULES = ["1f1b", "gpipe", "zero-bubble", "eager-1f1b"]


@pytest.mark.parametrize("schedule", left_out(SCHEDULES, ["eager-1f1b"]))
def test_estimates_are_near_what_is_counted(schedule):
    found = cluster([(2e-3, 1), (5e-3, 2)])
    every = [(seconds, exact.seconds) for seconds, exact in estimated(found, 32, schedule) if exact]
    least = min(exact for _, exact in every)
    errors = [abs(seconds / exact - 1) for seconds, exact in every if seconds < 1.5 * least]
    assert len(errors) > 10
    assert sum(errors) / len(errors) < 0.1


def test_the_least_estimate_is_nearly_the_best():
    """Of all that are counted; the search counts more than a few."""
    every = [x for x in estimated(cluster([(1e-3, 1), (3e-3, 2)], calls=6), 16) if x[1]]
    few = sorted(every, key=lambda x: x[0])[:8]
    assert len(few) < len(every) / 4
    least = min(exact.seconds for _, exact in every)
    assert min(exact.seconds for _, exact in few) < 1.05 * least


def test_what_is_estimated_mostly_fits():
    """Where memory is short: else counting would be in vain."""
    found = cluster([(2e-3, 1), (5e-3, 2)], gib=0.9)
    every = [exact is not None for _, exact in estimated(found, 16)]
    assert every.count(True) > 0.7 * len(every) > 0


def test_hosts_with_the_same_devices_may_change_places():
    """Three stages, one a host: whichever of the hosts is where."""
    found = cluster([(1e-3, 6)])
    every, complete = list_rows(found.cluster.in_rank_order(), 3)
    whole = [row for row in every if [len(group) for group in row] == [2, 2, 2]]
    by_host = [row for row in whole if all(len({d.host for d in group}) == 1 for group in row)]
    assert complete and len(by_host) == 1


def test_slow_links_make_more_micro_batches_wait():
    """With messages as long as passes, twice as many under way are worth their memory."""
    found = cluster([(2e-3, 2)], link=3e8, calls=8)
    apart = found.model_copy(
        update={
            "cluster": found.cluster.model_copy(
                update={
                    "devices": tuple(
                        d.model_copy(update={"host": f"h{n}"})
                        for n, d in enumerate(found.cluster.devices)
                    )
                }
            )
        }
    )

    def step_s(schedule: str) -> float:
        space = Space(
            zero_stages=0,
            gradient_checkpointing=True,
            pipeline_schedules=schedule,
            cross_entropy="whole",
        )
        plan = plan_staged(apart, PlanRequest(global_batch=32, space=space))
        return get_prediction(plan).step_s

    assert step_s("eager-1f1b") < 0.97 * step_s("1f1b")
