"""A plan of several stages whose devices take other times than it says: whether it is made anew."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import Card, block, in_a_row, line, profile, steady

from gpumix.cost.predict import predict
from gpumix.hardware.whatif import with_slower
from gpumix.planner.explain import plan as make_plan
from gpumix.spec.network import Link
from gpumix.spec.network import Network as StatedNetwork
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.spec.space import Space
from gpumix.train.restage import WINDOW_STEPS, Restaging

BATCH, STEPS = 16, 10_000
SPACE = Space(tensor=(1,), leave_out=False)


def replan(found: Profile) -> Plan:
    return make_plan(found, BATCH, strategy="staged", space=SPACE)


@pytest.fixture(scope="module")
def measured() -> Profile:
    cards = [Card("a", 2, 10**9, steady(1.0)), Card("b", 2, 10**9, steady(2.0))]
    links = StatedNetwork(inside=Link.stated(1e10, 1e-5), between=Link.stated(1e9, 1e-5))
    found = profile(cards, calls=("block",) * 12, kinds=[block(trainable=1000)], links=links)
    return in_a_row(found, message=line(1e4))


@pytest.fixture(scope="module")
def staged(measured) -> Plan:
    made = replan(measured)
    assert len(made.stages) > 1
    return made


def watched(staged, measured, *, steps: int = STEPS, calls: list[Profile] | None = None):
    def planner(found: Profile) -> Plan:
        if calls is not None:
            calls.append(found)
        return replan(found)

    return Restaging(staged, measured, replan=planner, steps=steps)


def times(
    staged: Plan, factors: dict[str, float] | None = None, all_of: float = 1.0
) -> list[float]:
    """What ranks take in a step, in the order of the plan's workers."""
    busy = {w.device: w.busy_s for w in staged.prediction.workers}
    return [busy[w.device] * all_of * (factors or {}).get(w.device, 1.0) for w in staged.workers]


def work_of(plan: Plan) -> Counter[str]:
    """Calls of units for a sample, by device."""
    work: Counter[str] = Counter()
    for stage in plan.stages:
        work.update({w.device: len(stage.units) * w.samples for w in stage.workers})
    return work


def found_in(watch: Restaging, seconds: list[float], steps: int = 3 * WINDOW_STEPS):
    every = [watch.observe(seconds) for _ in range(steps)]
    return [one for one in every if one is not None]


@pytest.mark.parametrize("all_of", [0.5, 1.0, 3.0])
def test_who_is_as_planned_against_the_others_stays(staged, measured, all_of):
    watch = watched(staged, measured)
    assert not found_in(watch, times(staged, {"a-0": 1.1}, all_of), 200)


@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_a_device_that_takes_other_times_makes_another_plan(staged, measured, factor):
    device = staged.workers[-1].device
    (error,) = found_in(watched(staged, measured), times(staged, {device: factor}, 1.3))
    assert error.slower == {device: pytest.approx(factor, rel=0.01)}
    assert f"device '{device}' takes {factor:.2f} times as long" in error.what
    new, old = replan(with_slower(measured, error.slower)), staged
    units = [
        {w.device: len(s.units) * w.samples for s in p.stages for w in s.workers}
        for p in (new, old)
    ]
    assert (units[0][device] < units[1][device]) is (factor > 1)


def test_what_happens_once_is_no_reason(staged, measured):
    watch, slow = watched(staged, measured), times(staged, {staged.workers[0].device: 5.0})
    for _ in range(20):
        assert not found_in(watch, slow, WINDOW_STEPS - 1)
        assert not found_in(watch, times(staged), 1)


def test_steps_that_do_not_count_are_left_out(staged, measured):
    assert not found_in(watched(staged, measured), [0.0] * len(staged.workers), 100)


def test_near_the_end_it_is_not_worth_a_start(staged, measured):
    slow = times(staged, {staged.workers[0].device: 1.5})
    assert not found_in(watched(staged, measured, steps=WINDOW_STEPS), slow, WINDOW_STEPS)


def test_what_is_not_worth_it_is_looked_into_once(staged, measured):
    calls: list[Profile] = []
    watch = watched(staged, measured, steps=4 * WINDOW_STEPS, calls=calls)
    for step in range(4 * WINDOW_STEPS - 1):
        watch.observe([s * 1e-6 for s in times(staged, {"a-0": 1.5 + 1e-4 * step})])
    assert len(calls) == 1


# -- devices that are slower than their class ------------------------------------------------------


@given(
    factors=st.dictionaries(
        st.sampled_from(["a-0", "a-1", "b-0", "b-1"]), st.sampled_from([0.5, 1.0, 1.25, 3.0])
    )
)
def test_a_device_takes_so_many_times_as_long_and_nothing_else_changes(measured, staged, factors):
    slower = with_slower(measured, factors)
    assert Profile.model_validate_json(slower.model_dump_json()) == slower
    classes = {d.id: d.device_class for d in slower.cluster.devices}
    workers = {w.device: w.busy_s for w in predict(slower, _with_classes(staged, classes)).workers}
    for one in staged.prediction.workers:
        wanted = one.busy_s * factors.get(one.device, 1.0)
        assert workers[one.device] == pytest.approx(wanted, rel=1e-6)


def test_without_a_change_it_is_the_same_profile(measured):
    assert with_slower(measured, {"a-0": 1.001}) == measured
    assert with_slower(measured, {}) == measured


def _with_classes(plan: Plan, classes: dict[str, str]) -> Plan:
    stages = tuple(
        s.model_copy(
            update={
                "workers": tuple(
                    w.model_copy(update={"device_class": classes[w.device]}) for w in s.workers
                )
            }
        )
        for s in plan.stages
    )
    return plan.model_copy(update={"stages": stages})
