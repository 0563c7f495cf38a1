"""The optimal plan against HiGHS, where there are too many plans to try them all."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from gpumix.planner.data_parallel.branch_and_bound import EXACT_GAP
from gpumix.planner.data_parallel.search import LARGE_GAP
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import ROOT, Profile, UnitTimes
from helpers.extended import left_out
from helpers.plans.brute import plan_of
from helpers.plans.milp import groups_of, least_step_s
from helpers.plans.naive import exposed_seconds, peak_bytes, step_seconds
from helpers.plans.profiles import FREE, Card, Network, block, curve, profile, root

SPACE = Space(
    zero_stages=(3,), shardings=("all",), orders=("layered",), cross_entropy="whole", padded=False
)
MODES = list(SPACE.modes(3))
SOLVER = 1e-5  # what HiGHS takes for equal


def rising(dice: Random, scale: float, *, last: int = 6):
    """A noisy curve that grows a little less than evenly."""
    sizes = [1, 2, 4, last]
    return curve(*(scale * (0.3 + n * dice.uniform(0.7, 1.1)) for n in sizes), sizes=sizes)


def random_profile(dice: Random, counts: tuple[int, ...], room: float, update: float) -> Profile:
    """Classes of unlike speed and memory; beside what a block takes while it is computed, a device
    has about `room` bytes for each element of a block."""
    calls, elements = dice.randint(3, 5), dice.randint(5_000, 9_000)
    cards = []
    for i, count in enumerate(counts):
        speed = dice.uniform(1, 5) * 1e-2
        times = UnitTimes(
            forward=rising(dice, speed),
            backward=rising(dice, 3 * speed),
            gradient=rising(dice, 2 * speed),
        )
        cards.append(
            Card(
                f"c{i}",
                count,
                int((24 + dice.uniform(0.5, 1.5) * room) * elements),
                {"block": times, ROOT: UnitTimes(forward=FREE, backward=rising(dice, speed / 4))},
                optimizer_s_per_element=update * dice.uniform(0.5, 2) / (elements * calls),
                largest=4,
                host_copy=curve(1e-3, 1e-1, sizes=(1e3, 1e6)),
                host_bytes=dice.choice([None, 40_000]),
            )
        )
    gather, reduce = (curve(0.01, 0.05, sizes=(1e4, 1e6)) for _ in range(2))
    return profile(
        cards,
        calls=("block",) * calls,
        kinds=[
            block(
                trainable=elements,
                kept=rising(dice, 2_000),
                saved=rising(dice, 9_000),
                saved_forward=rising(dice, 1_000),
                saved_backward=rising(dice, 3_000),
                gradient=rising(dice, 1_000),
                forward=rising(dice, 3_000),
                backward=rising(dice, 9_000),
            )
        ],
        root_unit=root(elements // 3, kept=rising(dice, 500), head=rising(dice, 5_000)),
        network=Network({"broadcast": gather}, {"all_to_all": reduce}, contention=0.2),
    )


def check(profile: Profile, batch: int, *, alone: bool, gap: float) -> Plan | None:
    """A plan that fits, takes what it says, and is as fast as the solver's but for the gap that it
    states; none if the solver finds none."""
    plan = plan_of(profile, batch, SPACE)
    within_s = inf if plan is None else step_seconds(profile, plan)
    groups = groups_of(profile, batch, MODES, within_s=within_s, alone=alone)
    least = least_step_s(groups, batch)
    if plan is None:
        assert least is None
        return None
    for rank, worker in enumerate(plan.prediction.workers):
        assert peak_bytes(profile, plan, rank)[0] <= worker.memory_limit_bytes
    assert plan.prediction.step_s == pytest.approx(within_s, rel=1e-9)
    expected = inf if least is None else least + exposed_seconds(profile, plan)
    assert within_s <= expected * (1 + gap + SOLVER)
    assert plan.prediction.bound_s <= expected * (1 + SOLVER)
    assert within_s <= plan.prediction.bound_s * (1 + gap + 1e-9)
    return plan


ROOMS = [(0, 17), (0, 55), (2, 27), (3, 17), (3, 55)]


@pytest.mark.parametrize(("seed", "room"), left_out(ROOMS, ROOMS[1:]))
def test_no_plan_of_many_options_is_faster(seed, room):
    dice = Random(seed)
    counts = dice.choice([(2, 2, 2), (3, 2, 1), (4, 3), (1, 2, 4), (3, 3, 2)])
    profile = random_profile(dice, counts, room, update=0.5)
    check(profile, dice.randint(24, 40), alone=True, gap=EXACT_GAP)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_what_does_not_fit_has_no_solution(seed):
    profile = random_profile(Random(seed), (2, 1, 1), 10, update=0.0)
    assert check(profile, 16, alone=False, gap=EXACT_GAP) is None


COUNTS = [(0, 4, 9), (0, 20, 60), (1, 20, 60), (2, 20, 60)]


@pytest.mark.parametrize(("seed", "least", "most"), left_out(COUNTS, COUNTS[1:]))
def test_no_plan_of_many_devices_is_faster_than_the_gap_says(seed, least, most):
    """Updates that take no time: then devices of a class need no variables of their own."""
    dice = Random(seed)
    counts = tuple(dice.randint(least, most) for _ in range(3))
    profile = random_profile(dice, counts, dice.uniform(15, 50), update=0.0)
    batch = dice.randint(3, 8) * sum(counts)
    assert check(profile, batch, alone=False, gap=LARGE_GAP) is not None
