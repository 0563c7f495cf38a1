"""Plans of several stages: the fastest of all, against trying everything; and what they are for."""

from __future__ import annotations

import re
from collections import Counter
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.peak_memory import compute_usable_bytes
from gpumix.cost.predict import predict
from gpumix.planner.baselines.naive_model_parallel import plan_naive_model_parallel
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.pipeline_parallel.micro_batch_counts import deal_by_speed
from gpumix.planner.pipeline_parallel.search import SCHEDULES
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.cluster.network import Link
from gpumix.schema.cluster.network import Network as StatedNetwork
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan, Schedule
from gpumix.schema.profile.profile import Profile
from helpers.draws import examples
from helpers.errors import raises
from helpers.extended import every_second, every_third, left_out
from helpers.plans.every_stage import dealt, every_deal, every_plan, least_s, steps
from helpers.plans.profiles import GIB, Card, block, in_a_row, line, profile, root, steady

ALIKE = Space(
    zero_stages=0, gradient_checkpointing=True, pipeline_schedules="1f1b", cross_entropy="whole"
)
SPACE = Space(
    zero_stages=(0, 1),
    gradient_checkpointing=True,
    pipeline_schedules=("1f1b",),
    cross_entropy="whole",
)


def cluster(
    cards: list[tuple[float, int]],
    *,
    calls: int = 4,
    memory: int = GIB,
    link: float = 1e9,
    message: float = 1e3,
    per_host: int = 1,
    start: float = 0.0,
    largest: dict[int, int] | None = None,
    chunked: bool = False,
) -> Profile:
    """Cards by seconds of a sample and their number, `per_host` on a host; of some only
    micro-batches up to `largest` were measured."""
    found = profile(
        [
            Card(
                f"c{n}",
                count,
                memory,
                steady(s, start=start * s),
                per_host=per_host,
                largest=(largest or {}).get(n),
                chunked_cross_entropy=line(1e-5) if chunked else None,
            )
            for n, (s, count) in enumerate(cards)
        ],
        calls=("block",) * calls,
        kinds=[block(kept=line(message), gradient=line(message), backward=line(message))],
        root_unit=root(head=line(2e4), chunked_cross_entropy=line(1e3)) if chunked else None,
        links=StatedNetwork(between=Link.stated(link, 1e-5), inside=Link.stated(link, 1e-5)),
    )
    return in_a_row(found, message=line(message))


def fits(plan: Plan) -> bool:
    return all(w.peak_bytes <= w.memory_limit_bytes for w in get_prediction(plan).workers)


@pytest.mark.extended
@examples(5)
@given(
    speeds=st.lists(st.sampled_from([1e-3, 2e-3, 3.5e-3]), min_size=2, max_size=3),
    batch=st.integers(2, 4),
    calls=st.integers(2, 4),
    start=st.sampled_from([0.0, 0.5]),
    link=st.sampled_from([1e6, 1e9]),
)
def test_no_plan_of_stages_is_faster(speeds, batch, calls, start, link):
    is_the_fastest_of_equal_shares(speeds, batch, calls, start, link)


@pytest.mark.parametrize(
    ("speeds", "batch", "calls", "start", "link"),
    [
        ([1e-3, 2e-3], 4, 4, 0.5, 1e9),
        ([1e-3, 3.5e-3], 3, 4, 0.0, 1e6),
        ([1e-3, 2e-3, 3.5e-3], 2, 2, 0.0, 1e9),
    ],
)
def test_no_plan_of_stages_of_a_few_devices_is_faster(speeds, batch, calls, start, link):
    is_the_fastest_of_equal_shares(speeds, batch, calls, start, link)


def is_the_fastest_of_equal_shares(
    speeds: list[float], batch: int, calls: int, start: float, link: float
) -> None:
    found = cluster([(s, 1) for s in speeds], calls=calls, start=start, link=link)
    plan = plan_staged(found, PlanRequest(global_batch=batch, space=SPACE))
    assert fits(plan)
    assert get_prediction(plan).step_s == pytest.approx(least_s(found, batch, SPACE), rel=1e-6)
    assert get_prediction(plan).bound_s <= get_prediction(plan).step_s


def with_room(found: Profile, part: float) -> Profile:
    """Devices with so much of what they have for plans, and 64 bytes for rounding."""
    classes = []
    for one in found.cluster.classes:
        wanted = part * compute_usable_bytes(one) + 64
        memory = one.memory_bytes * wanted / compute_usable_bytes(one)
        classes.append(one.model_copy(update={"memory_bytes": int(memory)}))
    cluster = found.cluster.model_copy(update={"classes": tuple(classes)})
    return found.model_copy(update={"cluster": cluster})


def is_the_fastest(found: Profile, batch: int, space: Space, *, short: bool) -> Plan | None:
    """The plan that is found, which is compared with all that there are; None if none has room.

    Where shares of state are equal in it, it is the fastest of all whose shares are.

    Args:
        short: devices have so little memory that half of all plans have no room.
    """
    every = steps(found, batch, space)
    if short and every:
        part = median(full for _, full in every)
        every = [(seconds, full) for seconds, full in every if full <= part]
        found = with_room(found, part)
    wanted_s = min((seconds for seconds, _ in every), default=float("inf"))
    try:
        plan = plan_staged(found, PlanRequest(global_batch=batch, space=space))
    except NoFeasiblePlanError:
        assert wanted_s == float("inf")
        return None
    assert fits(plan)
    assert step_s(plan) <= wanted_s * (1 + 1e-6)
    assert get_prediction(plan).bound_s <= step_s(plan)
    if all(len({w.state_share for w in stage.workers}) == 1 for stage in plan.stages):
        assert step_s(plan) == pytest.approx(wanted_s, rel=1e-6)
    return plan


@pytest.mark.slow
@examples(2)
@given(
    speeds=st.tuples(st.just(1e-3), st.sampled_from([1e-3, 2.2e-3])),
    batch=st.integers(2, 3),
    calls=st.integers(2, 4),
    link=st.sampled_from([1e6, 1e9]),
    zero_stages=st.permutations(range(4)).map(lambda every: every[:2]),
    chunked=st.booleans(),
    short=st.booleans(),
)
def test_of_two_devices_no_plan_of_any_kind_is_faster(
    speeds, batch, calls, link, zero_stages, chunked, short
):
    """By all schedules, in all modes, with both heads; and it is known that none is."""
    cards = sorted(Counter(speeds).items())
    found = with_split_backward(cluster(cards, calls=calls, link=link, chunked=chunked))
    plan = is_the_fastest(found, batch, Space(zero_stages=zero_stages), short=short)
    assert plan is not None
    assert get_prediction(plan).bound_s == pytest.approx(step_s(plan))


@pytest.mark.extended
@pytest.mark.slow
@examples(3)
@given(
    speeds=st.lists(st.sampled_from([1e-3, 2.2e-3]), min_size=3, max_size=3),
    link=st.sampled_from([1e6, 1e9]),
    per_host=st.integers(1, 2),
    schedule=st.sampled_from(SCHEDULES),
    zero_stage=st.integers(0, 3),
    batch=st.integers(2, 3),
    short=st.booleans(),
)
def test_of_three_devices_no_plan_of_some_kinds_is_faster(
    speeds, link, per_host, schedule, zero_stage, batch, short
):
    """In both modes, by all numbers of waves, all ways to deal micro-batches to workers."""
    cards = sorted(Counter(speeds).items())
    calls = 4 if schedule == "interleaved" else 3
    found = with_split_backward(cluster(cards, calls=calls, link=link, per_host=per_host))
    space = Space(zero_stages=zero_stage, pipeline_schedules=schedule, cross_entropy="whole")
    is_the_fastest(found, batch, space, short=short)


@pytest.mark.extended
@pytest.mark.parametrize("batch", [4, 8])
def test_of_two_unlike_devices_it_is_proven_in_the_default_space(batch):
    found = with_split_backward(cluster([(1e-3, 1), (2.2e-3, 1)], calls=8, chunked=True))
    plan = plan_staged(found, PlanRequest(global_batch=batch, space=Space()))
    assert get_prediction(plan).bound_s == pytest.approx(step_s(plan))


def with_split_backward(found: Profile) -> Profile:
    """Its units were measured with kept graphs, and with a backward in two parts."""
    held = ("saved", "saved_forward", "saved_backward", "split", "split_backward")
    kinds = tuple(k.model_copy(update=dict.fromkeys(held, line(1e4))) for k in found.model.kinds)
    classes = []
    for one in found.classes:
        unit = one.units["block"]
        twice = Curve(sizes=unit.forward.sizes, values=tuple(2 * v for v in unit.forward.values))
        halves = {"gradient": twice, "inputs": unit.forward, "weights": unit.forward}
        units = dict(one.units) | {"block": unit.model_copy(update=halves)}
        classes.append(one.model_copy(update={"units": units}))
    model = found.model.model_copy(update={"kinds": kinds})
    return found.model_copy(update={"classes": tuple(classes), "model": model})


@pytest.mark.extended
@pytest.mark.parametrize(
    ("cards", "link"),
    [
        ([(1e-3, 1), (1.5e-3, 1), (3e-3, 2)], 1e7),
        ([(1e-3, 2), (2.2e-3, 2)], 1e8),
        ([(1e-3, 2), (2e-3, 3)], 1e7),
    ],
)
def test_no_schedule_is_faster_where_it_is_the_only_one(cards, link):
    """Where there are too many plans to look at all of them."""
    found = with_split_backward(cluster(cards, calls=9, link=link, message=1e4))

    def step_s(*schedules: Schedule) -> float:
        space = Space(zero_stages=(0, 1), pipeline_schedules=schedules, cross_entropy="whole")
        return get_prediction(plan_staged(found, PlanRequest(global_batch=8, space=space))).step_s

    several: tuple[Schedule, ...] = ("1f1b", "eager-1f1b", "gpipe", "zero-bubble")
    assert step_s(*several) <= 1.005 * min(map(step_s, several))


def test_layers_go_where_they_are_computed_fast():
    found = cluster([(1e-3, 1), (3e-3, 1)], calls=8)
    plan = plan_staged(found, PlanRequest(global_batch=32, space=SPACE))
    layers = {s.workers[0].device_class: len(s.units) for s in plan.stages}
    assert layers == {"c0": 6, "c1": 2}


@pytest.mark.parametrize("most", [2, 4])
def test_stages_that_go_round_count_each_time(most):
    space = Space(
        max_pipeline_stages=most,
        pipeline_schedules=("1f1b", "interleaved"),
        gradient_checkpointing=True,
    )
    plan = plan_staged(cluster([(1e-3, 2)], calls=8), PlanRequest(global_batch=4, space=space))
    assert len(plan.stages) == most and space.missing(plan) == ""


@pytest.mark.parametrize(
    ("space", "told", "fix"),
    [
        (
            {"pipeline_schedules": "interleaved", "max_pipeline_stages": 2},
            {"code": "no-schedule-for-stages", "why": (4, "techniques.max_pipeline_stages", 2)},
            r"max_pipeline_stages to \d or more",
        ),
        (
            {
                "pipeline_schedules": "interleaved",
                "min_pipeline_stages": 5,
                "max_pipeline_stages": 5,
            },
            {"code": "no-schedule-for-stages", "why": (6, "techniques.max_pipeline_stages", 5)},
            r"max_pipeline_stages to \d or more",
        ),
        (
            {"pipeline_schedules": "zero-bubble", "gradient_checkpointing": True},
            {"code": "no-schedule-for-stages", "why": "gradient_checkpointing"},
            r"gradient_checkpointing: \[true, false\]",
        ),
    ],
)
def test_why_a_schedule_is_not_possible_is_told(space, told, fix):
    with raises(NoFeasiblePlanError, **told) as caught:
        plan_staged(
            cluster([(1e-3, 4)], calls=8), PlanRequest(global_batch=4, space=Space(**space))
        )
    assert re.search(fix, caught.value.fix)
    assert "profile" not in caught.value.fix


@pytest.mark.parametrize("zero_stage", left_out([1, 2, 3], [1, 2]))
def test_zero_bubble_goes_with_every_zero_stage(zero_stage):
    found = with_split_backward(cluster([(1e-3, 2), (3e-3, 2)], calls=4, link=1e9))
    space = Space(zero_stages=zero_stage, pipeline_schedules="zero-bubble", max_pipeline_stages=2)
    plan = plan_staged(found, PlanRequest(global_batch=4, space=space))
    assert (plan.zero_stage, plan.schedule, len(plan.stages)) == (zero_stage, "zero-bubble", 2)
    assert not any(worker.mode.recompute for worker in plan.workers)


def test_each_schedule_has_its_own_reason():
    space = Space(
        pipeline_schedules=("interleaved", "zero-bubble"),
        max_pipeline_stages=2,
        gradient_checkpointing=True,
    )
    with pytest.raises(NoFeasiblePlanError) as caught:
        plan_staged(cluster([(1e-3, 4)], calls=8), PlanRequest(global_batch=4, space=space))
    assert "interleaved: it has 2 stages for each" in caught.value.why
    assert "zero-bubble: it splits the backward" in caught.value.why


def test_stages_are_not_to_be_had_where_one_is_the_most():
    with raises(InputError, code="pipeline-stages-excluded", what=("max_pipeline_stages", 1)):
        plan_staged(
            cluster([(1e-3, 4)]), PlanRequest(global_batch=4, space=Space(max_pipeline_stages=1))
        )


def test_interleaved_stages_count_each():
    """Two groups of two stages each are four."""
    found = cluster([(1e-3, 2)], calls=8, link=1e12)
    for least in (3, 4):
        space = Space(pipeline_schedules="interleaved", min_pipeline_stages=least)
        plan = plan_staged(found, PlanRequest(global_batch=8, space=space))
        assert len(plan.stages) == 4
    three = Space(min_pipeline_stages=3, max_pipeline_stages=3)
    with pytest.raises(NoFeasiblePlanError):
        plan_staged(found, PlanRequest(global_batch=8, space=three))
    with raises(InputError, code="pipeline-stages-too-many", what=(2, 8)):
        plan_staged(found, PlanRequest(global_batch=8, space=Space(min_pipeline_stages=5)))


def test_micro_batches_go_to_workers_as_they_are_fast():
    assert deal_by_speed(8, [1.0, 3.0]) == (6, 2)
    assert deal_by_speed(3, [1.0, 1.0]) == (2, 1)
    assert deal_by_speed(2, [1.0, 5.0]) == (2, 0)


def test_what_does_not_fit_is_refused():
    found = cluster([(1e-3, 2)], memory=1000)
    with pytest.raises(NoFeasiblePlanError):
        plan_staged(found, PlanRequest(global_batch=4, space=SPACE))


@pytest.mark.parametrize("devices", [1])
def test_one_device_has_one_stage(devices):
    found = cluster([(1e-3, devices)])
    with raises(InputError, code="pipeline-of-one-device"):
        plan_staged(found, PlanRequest(global_batch=4))


def test_a_profile_without_needs_is_told():
    found = cluster([(1e-3, 2)])
    bare = found.model_copy(update={"model": found.model.model_copy(update={"needs": ()})})
    with raises(InputError, code="profile-without-dataflow"):
        plan_staged(bare, PlanRequest(global_batch=4))


@pytest.mark.parametrize("strategy", [plan_staged, plan_naive_model_parallel])
def test_on_some_devices_no_others_are_used(strategy):
    found = cluster([(1e-3, 2), (2e-3, 2)])
    some = ("c0-0", "c1-1")
    plan = strategy(found, PlanRequest(global_batch=8, devices=some))
    assert {w.device for w in plan.workers} == set(some)


@pytest.mark.parametrize("stages", left_out([2, 3], [2]))
def test_a_pinned_number_of_stages_is_that_of_the_fastest_such_plan(stages):
    found = cluster([(1.0, 1), (2.0, 2)], calls=3)
    space = SPACE.model_copy(update={"min_pipeline_stages": stages, "max_pipeline_stages": stages})
    plan = plan_staged(found, PlanRequest(global_batch=2, space=space))
    assert len(plan.stages) == stages
    wanted_s = min(
        predict(found, one).step_s
        for one in every_plan(found, 2, SPACE)
        if len(one.stages) == stages
    )
    assert get_prediction(plan).step_s <= wanted_s * (1 + 1e-9)


@pytest.mark.parametrize("strategy", left_out(["optimal", "staged"], ["staged"]))
def test_advice_to_take_one_class_keeps_to_what_is_pinned(strategy):
    """In one stage the fast two would be much faster; the other class has one device alone."""
    found = cluster([(1.0, 2), (9.0, 1)], calls=6, link=1e4)
    space = SPACE.model_copy(update={"min_pipeline_stages": 2})
    plan = make_plan(found, 4, strategy=strategy, space=space)
    assert plan.reasons is not None
    others = {one.strategy: one for one in plan.reasons.alternatives}
    fast = PlanRequest(global_batch=4, devices=("c0-0", "c0-1"), space=space)
    wanted = get_prediction(plan_staged(found, fast)).step_s
    assert others["only c0"].step_s == pytest.approx(wanted)
    assert others["only c1"].step_s is None and "one device alone" in others["only c1"].why


def test_one_class_alone_may_have_stages_too():
    """The slow card is left out; the two that are left are faster in stages, for links are slow."""
    found = cluster([(1.0, 2), (1e3, 1)], calls=6, link=1e2, message=10.0)
    plan = make_plan(found, 4, space=SPACE.model_copy(update={"leave_out": True}))
    assert len(plan.stages) > 1 and plan.reasons is not None
    others = {one.strategy: one for one in plan.reasons.alternatives}
    assert others["only c0"].step_s == pytest.approx(get_prediction(plan).step_s)


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["optimal", "staged"])
def test_what_plans_stages_plans_no_fewer_than_wanted(strategy):
    found = cluster([(1.0, 3)], link=1e12)
    assert (
        len(make_plan(found, 4, strategy=strategy, space=Space(min_pipeline_stages=3)).stages) >= 3
    )


@pytest.mark.parametrize("strategy", ["model", "even", "best-subset"])
def test_a_number_of_stages_that_nobody_looks_at_is_refused(strategy):
    with raises(InputError, code="pipeline-stages-without-effect", what="min_pipeline_stages"):
        make_plan(cluster([(1.0, 3)]), 4, strategy=strategy, space=Space(min_pipeline_stages=2))


def test_more_stages_than_devices_or_units_are_refused():
    space = Space(min_pipeline_stages=4, pipeline_schedules="1f1b")
    with raises(InputError, code="pipeline-stages-too-many", what=(4, 3)):
        plan_staged(cluster([(1.0, 3)]), PlanRequest(global_batch=4, space=space))
    space = Space(min_pipeline_stages=3, pipeline_schedules="1f1b")
    with raises(InputError, code="pipeline-stages-too-many", what=(3, 4, 2)):
        plan_staged(cluster([(1.0, 4)], calls=2), PlanRequest(global_batch=4, space=space))
    with pytest.raises(ValueError, match=r"'min_pipeline_stages'.* 4.*'max_pipeline_stages'.* 2"):
        Space(min_pipeline_stages=4, max_pipeline_stages=2)


# -- units that are called again -------------------------------------------------------------------


def calling(order: list[int], devices: int = 3) -> Profile:
    """A model whose blocks are called in this order."""
    found = cluster([(1.0, devices)], calls=len(order), link=1e12)
    calls = tuple(f"layers.{number}" for number in order)
    return found.model_copy(update={"model": found.model.model_copy(update={"calls": calls})})


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10))
def test_a_model_is_cut_where_no_unit_is_called_on_both_sides(order):
    model = calling(order).model
    expected = [n for n in range(1, len(order)) if not set(order[:n]) & set(order[n:])]
    assert list(model.cuts) == expected


@pytest.mark.parametrize("strategy", every_third(["staged", "model", "optimal"]))
@pytest.mark.parametrize("order", every_second([[0, 1, 0, 1, 2, 3], [0, 1, 1, 2, 2, 2, 3]]))
def test_all_calls_of_a_unit_are_in_one_stage(strategy, order):
    space = Space(min_pipeline_stages=2 if strategy == "optimal" else 1)
    plan = make_plan(calling(order), 6, strategy=strategy, space=space)
    assert len(plan.stages) > 1
    stages = [set(stage.units) for stage in plan.stages]
    assert sum(map(len, stages)) == len(set.union(*stages))


@pytest.mark.parametrize("strategy", ["staged", "model"])
def test_a_model_that_begins_again_has_one_stage(strategy):
    again = calling([0, 1, 2, 0, 1, 2])
    with raises(InputError, code="model-not-cuttable"):
        make_plan(again, 6, strategy=strategy)
    assert len(make_plan(again, 6, strategy="optimal").stages) == 1


# -- what is proven --------------------------------------------------------------------------------


def step_s(plan: Plan) -> float:
    return get_prediction(plan).step_s


def least_of_many_deals(found: Profile, row: list[list[str]], cut: int, batch: int) -> float:
    """The shortest step of these groups of devices in two stages, by micro-batches of one."""
    devices = {device.id: device for device in found.cluster.devices}
    groups = [[devices[name] for name in group] for group in row]
    return min(
        predict(found, plan).step_s
        for deal in every_deal(list(map(len, groups)), batch)
        for plan in dealt(found, groups, deal, 1, batch, "1f1b", ALIKE, [(cut,)])
    )


@pytest.mark.parametrize("batch", left_out([4, 9], [9]))
def test_micro_batches_are_dealt_otherwise_than_by_speed_where_that_is_faster(batch):
    """And where there are too many ways for all of them no more is claimed than is known."""
    found = cluster([(1e-3, 2), (3.5e-3, 3)], calls=2)
    space = Space(
        zero_stages=0,
        gradient_checkpointing=True,
        pipeline_schedules="1f1b",
        cross_entropy="whole",
        max_pipeline_stages=2,
    )
    plan = plan_staged(found, PlanRequest(global_batch=batch, space=space))
    row = [[w.device for w in stage.workers] for stage in plan.stages]
    wanted_s = least_of_many_deals(found, row, len(plan.stages[0].units), batch)
    assert get_prediction(plan).bound_s <= wanted_s
    assert step_s(plan) == pytest.approx(wanted_s)


@pytest.mark.parametrize(("batch", "start"), every_third([(20, 5.0), (64, 20.0), (100, 5.0)]))
def test_of_many_sizes_large_ones_are_tried_too(batch, start):
    found = cluster([(1e-3, 1), (1.7e-3, 1)], calls=3, start=start)
    plan = plan_staged(found, PlanRequest(global_batch=batch, space=ALIKE))
    wanted_s = min(predict(found, one).step_s for one in every_plan(found, batch, ALIKE))
    assert get_prediction(plan).bound_s <= wanted_s * (1 + 1e-9)
    assert step_s(plan) <= 1.02 * wanted_s


# -- what was measured -----------------------------------------------------------------------------


def test_what_classes_that_take_no_part_can_run_is_of_no_matter():
    limited = cluster([(1e-3, 2), (2e-3, 1)], start=50.0, largest={1: 1})
    free = cluster([(1e-3, 2), (2e-3, 1)], start=50.0)
    request = PlanRequest(global_batch=8, devices=("c0-0", "c0-1"))
    assert step_s(plan_staged(limited, request)) == step_s(plan_staged(free, request))


def test_no_micro_batch_is_larger_than_was_measured():
    found = cluster([(1e-3, 1), (2e-3, 1)], start=50.0, largest={1: 3})
    plan = plan_staged(found, PlanRequest(global_batch=8))
    assert max(worker.micro_batch for worker in plan.workers) <= 3


@pytest.mark.parametrize("strategy", ["staged", "model", "optimal"])
@pytest.mark.parametrize(
    ("space", "named"),
    [
        (Space(cross_entropy="chunked"), "chunked cross-entropy"),
        (Space(gradient_checkpointing=False), "kept graphs"),
    ],
)
def test_what_was_not_measured_is_told(strategy, space, named):
    if strategy == "optimal":
        space = space.model_copy(update={"min_pipeline_stages": 2})
    code = "no-stage-per-device" if strategy == "model" else "no-schedule-for-stages"
    with raises(NoFeasiblePlanError, code=code) as caught:
        make_plan(cluster([(1e-3, 2)]), 4, strategy=strategy, space=space)
    assert named in str(caught.value)
    assert "or use `strategy: optimal`" not in caught.value.fix


# -- what a space leaves out -----------------------------------------------------------------------

PINS = [
    Space(state_on="host"),
    Space(checkpoints_on="host"),
    Space(orders="sequential"),
    Space(shardings="host"),
]


@pytest.mark.parametrize("space", PINS)
@pytest.mark.parametrize("strategy", ["staged", "model"])
def test_techniques_that_stages_have_not_are_refused(strategy, space):
    with raises(InputError, code="pipeline-needs-setting"):
        make_plan(cluster([(1e-3, 4)]), 8, strategy=strategy, space=space)


@pytest.mark.parametrize("space", PINS)
def test_what_is_pinned_is_kept_by_the_fastest(space):
    """Over a link over which stages would be faster; or there is no plan."""
    found = cluster([(1e-3, 4)], link=1e5)
    try:
        plan = make_plan(found, 8, space=space)
    except NoFeasiblePlanError as error:
        assert "short of 0 bytes" not in error.what
    else:
        assert len(plan.stages) == 1 and space.missing(plan) == ""


@pytest.mark.parametrize(
    "space",
    [
        Space(max_pipeline_stages=2, leave_out=False),
        Space(pipeline_schedules="gpipe"),
        Space(zero_stages=3),
        Space(tensor_parallel_size=2),
    ],
)
def test_naive_model_parallelism_is_refused_where_it_is_left_out(space):
    with pytest.raises(InputError):
        make_plan(cluster([(1e-3, 4)]), 8, strategy="model", space=space)


def test_a_head_in_chunks_is_the_last_stages():
    found = cluster([(1e-3, 2)], chunked=True)
    space = Space(cross_entropy="chunked", min_pipeline_stages=2)
    plan = make_plan(found, 4, space=space)
    assert space.missing(plan) == ""
    assert {w.mode.head for w in plan.stages[-1].workers} == {"chunked"}
    assert "chunked cross-entropy" in Space(cross_entropy="whole").missing(plan)
