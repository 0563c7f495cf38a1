"""The replay against the closed form of `cost`.

Equal where all ranks are alike. At ZeRO stage 0, where ranks meet only at the end, never longer.
At stage 3 the formula takes ranks to meet at the turn to the backward pass and nowhere in a
pass; in truth they may run the head and the last call's backward before that, and are held together
within a call or two. So the replay lies between the formula less these, and a step in which all
ranks meet after every call. At stage 2, which gathers nothing in the backward pass, the latter
holds. Contention c
makes a step longer, by no more than 1 + c.
"""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpumix.cost.predict import predict
from gpumix.schema.errors import InputError
from gpumix.schema.plan.stage import Mode
from gpumix.simulate.events import simulate
from helpers.draws import examples
from helpers.errors import raises
from helpers.plans.brute import plan_of, small_profiles
from helpers.plans.profiles import Network, fleet, line
from helpers.plans.replays import any_plans, cards, head_s, lockstep_s, plan_by_hand, wire

EASY = examples(6)
MODES = [Mode(recompute=r, boundary=b) for r, b in ((1, "device"), (1, "host"), (0, "device"))]
SEQUENTIAL = Mode(order="sequential")
ROUNDING = 1e-9


def agrees(replay) -> bool:
    return replay.step_s == pytest.approx(replay.predicted_s, rel=ROUNDING, abs=1e-15)


def without_contention(profile):
    return profile.model_copy(update={"contention": 0.0})


# -- equal -----------------------------------------------------------------------------------------


def test_a_step_by_hand():
    measured = cards((1.0, 2.0), calls=2, network=wire(3.0, 5.0), overhead=0.25)
    plan = plan_by_hand(measured, (1, 1))
    # The slow card binds: its calls take 2 and 6 s, its root 1 and 2 s. Collectives take 3 and 5 s.
    ends = 3 + 5 + 5
    forward = max(1, 3) + max(2, 3) + 2
    backward = 2 + max(6, 3) + max(6, 5)
    update = 0.5 * 2500 * 2e-4
    assert simulate(measured, plan).step_s == pytest.approx(
        0.25 + ends + forward + backward + update
    )


@pytest.mark.parametrize("mode", [*MODES, SEQUENTIAL], ids=Mode.describe)
def test_one_rank_takes_what_the_formula_says(mode):
    measured = cards((1.0,), network=wire(9.0, 9.0), overhead=0.5)
    replay = simulate(measured, plan_by_hand(measured, (7,), micro_batch=3, modes=(mode,)))
    assert agrees(replay)
    assert not [event for event in replay.events if event.kind in ("gather", "reduce")]


@pytest.mark.parametrize("seconds", [(0.1, 0.2), (4.0, 0.1), (0.1, 40.0), (50.0, 70.0), (5.0, 9.0)])
@pytest.mark.parametrize("contention", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("mode", MODES, ids=Mode.describe)
def test_alike_ranks_take_what_the_formula_says(seconds, contention, mode):
    measured = cards((1.0, 1.0, 1.0), network=wire(*seconds, contention=contention))
    assert agrees(simulate(measured, plan_by_hand(measured, (7,) * 3, micro_batch=3,
                                                  modes=(mode,) * 3)))  # fmt: skip


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("mode", MODES, ids=Mode.describe)
@pytest.mark.parametrize("seconds", [(0.1, 0.2), (50.0, 70.0)])
def test_alike_ranks_in_waves(zero_stage, mode, seconds):
    measured = cards((1.0, 1.0, 1.0), network=wire(*seconds))
    single = plan_by_hand(
        measured, (7,) * 3, micro_batch=2, modes=(mode,) * 3, zero_stage=zero_stage
    )
    waves = single.model_copy(update={"waves": 3})
    assert agrees(simulate(measured, waves))
    assert predict(measured, waves).step_s > predict(measured, single).step_s


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("mode", [*MODES, SEQUENTIAL], ids=Mode.describe)
@pytest.mark.parametrize("seconds", [(0.1, 0.2), (50.0, 70.0)])
def test_alike_ranks_at_other_stages(zero_stage, mode, seconds):
    measured = cards((1.0, 1.0), network=wire(*seconds))
    plan = plan_by_hand(measured, (6, 6), micro_batch=3, zero_stage=zero_stage, modes=(mode,) * 2)
    assert agrees(simulate(measured, plan))


def test_without_a_network_the_slowest_rank_counts():
    measured = cards((1.0, 2.0, 3.0))
    assert agrees(simulate(measured, plan_by_hand(measured, (4, 4, 0))))


def test_a_unit_called_in_succession_is_gathered_and_reduced_once():
    measured = cards((1.0, 1.0), calls=2, network=wire(10.0, 10.0))
    model = measured.model.model_copy(update={"calls": ("layer", "layer")})
    again = measured.model_copy(update={"model": model})
    replay = simulate(again, plan_by_hand(again, (1, 1)))
    assert agrees(replay)
    assert [(c.kind, c.call) for c in replay.program.collectives] == [
        ("gather", -1), ("gather", 0), ("reduce", 0), ("reduce", -1), ("meet", -1)
    ]  # fmt: skip


def test_of_frozen_units_only_parameters_move():
    from helpers.plans.profiles import block

    network = Network({"broadcast": line(1e-3)}, {"all_to_all": line(1e-3)})
    measured = cards((1.0, 1.0), calls=2, network=network)
    frozen = measured.model.model_copy(update={"kinds": (block(trainable=0, frozen=4000),)})
    measured = measured.model_copy(update={"model": frozen})
    replay = simulate(measured, plan_by_hand(measured, (1, 1)))
    moves = [(event.kind, event.call) for event in replay.events if event.lane is None]
    gathers = [("gather", -1), ("gather", 0), ("gather", 1)]
    assert moves == [*gathers, ("regather", 0), ("reduce", -1)]
    assert agrees(replay)


# -- between ---------------------------------------------------------------------------------------


@EASY
@given(small_profiles(), st.data())
def test_at_stage_0_no_longer_than_the_formula_says(profile, data):
    profile = without_contention(profile)
    plan = data.draw(any_plans(profile, (0,)))
    replay = simulate(profile, plan)
    assert replay.step_s <= replay.predicted_s * (1 + ROUNDING)


@EASY
@given(small_profiles(), st.data())
def test_at_stage_3_between_the_formula_and_lockstep(profile, data):
    profile = without_contention(profile)
    assume(all(kind.trainable for kind in profile.model.kinds))  # else nothing holds ranks together
    replay = simulate(profile, data.draw(any_plans(profile, (3,))))
    slack = ROUNDING * replay.predicted_s
    assert replay.predicted_s - head_s(replay) - slack <= replay.step_s
    assert replay.step_s <= lockstep_s(replay) + slack
    assert replay.predicted_s <= lockstep_s(replay) + slack


@EASY
@given(small_profiles(), st.data())
def test_at_stage_2_no_longer_than_lockstep(profile, data):
    profile = without_contention(profile)
    replay = simulate(profile, data.draw(any_plans(profile, (2,))))
    assert replay.step_s <= lockstep_s(replay) * (1 + ROUNDING)


@EASY
@given(small_profiles(), st.data())
def test_contention_costs_no_more_than_it_says(profile, data):
    plan = data.draw(any_plans(profile))
    least = simulate(without_contention(profile), plan).step_s
    step = simulate(profile, plan).step_s
    assert least * (1 - ROUNDING) <= step <= least * (1 + profile.contention) * (1 + ROUNDING)


@EASY
@given(small_profiles(), st.data())
def test_no_shorter_than_any_stream(profile, data):
    replay = simulate(profile, data.draw(any_plans(profile)))
    program = replay.program
    floor = program.overhead_s + max(sum(t.seconds for t in lane.tasks) for lane in program.lanes)
    moved = program.overhead_s + sum(c.seconds for c in program.collectives)
    assert replay.step_s >= max(floor, moved) * (1 - ROUNDING)


@pytest.mark.parametrize("batch", [16, 50, 300])
def test_plans_of_the_planner(batch):
    """They are balanced: no rank gets far ahead of the others."""
    profile = fleet(16, layers=8)
    plan = plan_of(profile, batch)
    assert plan is not None
    replay = simulate(profile, plan)
    assert replay.step_s == pytest.approx(replay.predicted_s, rel=0.01)


def test_on_a_model_of_many_layers_the_formula_is_close():
    dice, profile = random.Random(0), fleet(16, layers=24)
    off = []
    for _ in range(15):
        samples = [dice.randint(0, 12) for _ in range(16)]
        plan = plan_by_hand(profile, samples, micro_batch=dice.randint(1, 6))
        replay = simulate(profile, plan)
        off.append(replay.step_s / replay.predicted_s - 1)
    assert max(map(abs, off)) < 0.02
    assert statistics.mean(map(abs, off)) < 0.005


# -- what is refused -------------------------------------------------------------------------------


def test_a_plan_of_another_model_is_refused():
    measured = cards()
    plan = plan_by_hand(measured, (1, 1)).model_copy(update={"model": "another"})
    with raises(InputError, code="plan-profile-mismatch", what=("another", "synthetic")):
        simulate(measured, plan)


def test_the_formula_is_asked_with_the_same_profile():
    measured = cards()
    plan = plan_by_hand(measured, (1, 1))
    assert simulate(measured, plan).predicted_s == predict(measured, plan).step_s
