"""A replayed step of stages: each rank's time is all told, and the step is the predicted one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from gpumix.cost.predict import predict
from gpumix.planner.pipeline_parallel.candidate import (
    UncutCandidate,
    build_staged_plan,
    get_stages_per_group,
)
from gpumix.planner.pipeline_parallel.stage_modes import (
    NO_TENSOR_PARALLEL,
    StageMode,
    TensorParallelDegree,
)
from gpumix.schema.cluster.network import Link
from gpumix.schema.cluster.network import Network as StatedNetwork
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, Mode
from gpumix.schema.profile.profile import Profile
from gpumix.simulate.events import simulate
from gpumix.simulate.replay import Replay
from gpumix.simulate.timeline import compute_utilization, find_critical_path, list_critical_segments
from gpumix.simulate.trace import build_trace
from helpers.errors import raises
from helpers.extended import every_second
from helpers.plans.profiles import Card, block, in_a_row, line, profile, steady, with_tp_groups

GIB = 2**30
S = 1e-3  # seconds of a sample and call
MESSAGE = 1e3
KEPT = Mode(recompute=False)


def cluster(
    devices: int,
    *,
    link: float = 1e9,
    overhead: float = 0.0,
    calls: int = 4,
    per_host: int = 1,
) -> Profile:
    found = profile(
        [Card("a", devices, GIB, steady(S), per_host=per_host, optimizer_s_per_element=1e-7)],
        calls=("block",) * calls,
        kinds=[
            block(
                kept=line(MESSAGE),
                gradient=line(MESSAGE),
                backward=line(MESSAGE),
                saved=line(3 * MESSAGE),
            )
        ],
        links=StatedNetwork(between=Link.stated(link, 1e-6), inside=Link.stated(link, 1e-6)),
        overhead=overhead,
    )
    return in_a_row(found, message=line(MESSAGE))


def that_splits(found: Profile) -> Profile:
    """The same where it is known how long the parts of a split backward take."""
    parts = {"gradient": line(2 * S), "inputs": line(S), "weights": line(S)}
    (card,) = found.classes
    units = card.units | {"block": card.units["block"].model_copy(update=parts)}
    return found.model_copy(update={"classes": (card.model_copy(update={"units": units}),)})


def staged(
    found: Profile,
    groups: list[int],
    batches: int,
    *,
    tp: TensorParallelDegree = NO_TENSOR_PARALLEL,
    modes: Sequence[Mode] = (),
    **settings,
) -> Plan:
    """Each stage recomputes, or has a mode of its own."""
    devices, row, at = found.cluster.in_rank_order(), [], 0
    for size in groups:
        row.append(tuple(devices[at : at + size]))
        at += size
    calls, schedule = len(found.model.calls), settings.pop("schedule", "1f1b")
    stages = len(groups) * get_stages_per_group(schedule)
    cut = tuple(calls * (n + 1) // stages for n in range(stages))
    manners = tuple(StageMode(tp, mode) for mode in modes or (PLAIN,) * stages)
    way = UncutCandidate(tuple(row), manners, schedule, 1)
    workers = [size // tp.degree for size in groups]
    counts = settings.pop("counts", tuple((batches // n,) * n for n in workers))
    return build_staged_plan(found, batches, way, cut, counts, strategy="test", **settings)


PLANS = {
    "1f1b": ([1, 1], {}),
    "three stages": ([1, 1, 1], {}),
    "gpipe": ([1, 1], {"schedule": "gpipe"}),
    "unequal groups": ([2, 1], {"zero_stage": 1}),
    "waves": ([2, 2], {"zero_stage": 3, "waves": 2}),
    "eager-1f1b": ([1, 1, 1], {"schedule": "eager-1f1b"}),
    "eager waves": ([2, 2], {"schedule": "eager-1f1b", "zero_stage": 3, "waves": 4}),
    "zero-bubble": ([1, 1, 1], {"schedule": "zero-bubble", "modes": [KEPT] * 3}),
    "zero-bubble, unequal": (
        [1, 2],
        {"schedule": "zero-bubble", "zero_stage": 1, "modes": [KEPT, PLAIN]},
    ),
    "zero-bubble waves": (
        [2, 2],
        {"schedule": "zero-bubble", "zero_stage": 3, "waves": 2, "modes": [KEPT, KEPT]},
    ),
    "zero-bubble, all summed beside": ([1, 2], {"schedule": "zero-bubble", "modes": [KEPT, KEPT]}),
    "interleaved": ([1, 1], {"schedule": "interleaved"}),
    "interleaved waves": ([2, 2], {"schedule": "interleaved", "zero_stage": 3, "waves": 2}),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("overhead", every_second([0.01, 0.0]))
def test_each_moment_of_each_rank_is_told(name, overhead):
    groups, settings = PLANS[name]
    found = that_splits(cluster(sum(groups), overhead=overhead))
    plan = staged(found, groups, 8, **settings)
    replay = simulate(found, plan)
    assert replay.step_s == pytest.approx(replay.predicted_s)
    assert replay.step_s == pytest.approx(predict(found, plan).step_s)
    for use in compute_utilization(replay):
        told = use.busy_s + sum(use.idle_s.values())
        assert told == pytest.approx(replay.step_s)


@pytest.mark.parametrize("name", PLANS)
def test_the_critical_path_has_no_gap(name):
    groups, settings = PLANS[name]
    found = that_splits(cluster(sum(groups), overhead=0.01))
    replay = simulate(found, staged(found, groups, 8, **settings))
    path = find_critical_path(replay)
    assert path[0].start == 0.0 and path[-1].end == replay.step_s
    for one, other in pairwise(path):
        assert one.end == pytest.approx(other.start)
    assert sum(s.seconds for s in list_critical_segments(replay)) == pytest.approx(replay.step_s)


def test_the_bubble_is_the_textbooks():
    found = cluster(2, link=1e15)
    replay = simulate(found, staged(found, [1, 1], 8))
    idle = compute_utilization(replay)[0].idle_s["other stage"]
    assert idle / replay.step_s == pytest.approx(1 / 9, abs=0.01)


def put_off(link: float, **settings) -> Replay:
    """A step of a stage that recomputes and of one on two devices that puts weights off; each has
    two units of 1000 gradients."""
    found = that_splits(cluster(3, link=link))
    modes = [PLAIN, KEPT]
    return simulate(
        found, staged(found, [1, 2], 8, schedule="zero-bubble", modes=modes, **settings)
    )


@pytest.mark.parametrize(("zero_stage", "sent", "hidden_s"), [(0, 8000, S), (1, 4000, 0.0)])
def test_when_gradients_that_are_put_off_are_reduced(zero_stage, sent, hidden_s):
    """Half of each unit's to the other, whose half comes back summed at stage 0, where those of the
    second unit are on their way beside the first one; at stage 1 when all is computed."""
    link = 1e5
    own = [event for event in put_off(link, zero_stage=zero_stage).events if event.lane == 1]
    computed = max(event.end for event in own if event.kind == "weights")
    (reduced,) = (event for event in own if event.kind == "reduce")
    assert reduced.end - reduced.start == pytest.approx(sent / link - hidden_s, rel=0.001)
    assert reduced.start >= computed


def test_in_waves_gradients_that_are_put_off_are_reduced_in_each():
    """Two micro-batches a device and wave: their second unit, which nothing is moved beside, their
    first one beside the sum of the second, and the sum of the first."""
    link = 1e5
    replay = put_off(link, zero_stage=2, waves=2)
    taken = [e.end - e.start for e in replay.events if e.lane == 1 and e.kind == "weights"]
    assert taken == pytest.approx([2 * S + 2 * 2000 / link] * 2, rel=0.001)
    assert not [e for e in replay.events if e.lane == 1 and e.kind == "reduce"]


def test_no_backward_is_split_where_nothing_is_kept():
    found = that_splits(cluster(2))
    plan = staged(found, [1, 1], 8, schedule="zero-bubble", modes=[PLAIN, KEPT])
    other = staged(found, [1, 1], 8, modes=[PLAIN, KEPT])
    events = simulate(found, plan).events
    assert {event.lane for event in events if event.kind == "weights"} == {1}
    alike, split = (predict(found, one).workers for one in (other, plan))
    assert alike[0].busy_s == pytest.approx(split[0].busy_s)
    assert predict(cluster(2), staged(cluster(2), [1, 1], 8, schedule="zero-bubble")).step_s > 0


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (cluster(2, calls=6), {"code": "plan-unit-missing", "what": "layers.4"}),
        (cluster(1), {"code": "device-not-in-profile", "what": "a-1"}),
    ],
)
def test_a_profile_of_something_else_is_refused(other, told):
    with raises(InputError, **told):
        simulate(other, staged(cluster(2), [1, 1], 4))


def test_classes_that_were_not_measured_are_told():
    plan = staged(cluster(2), [1, 1], 4)
    stages = [
        s.model_copy(
            update={"workers": tuple(w.model_copy(update={"device_class": "b"}) for w in s.workers)}
        )
        for s in plan.stages
    ]
    with raises(InputError, code="profile-class-missing", what="b"):
        simulate(cluster(2), plan.model_copy(update={"stages": tuple(stages)}))


def test_a_slow_link_is_what_is_waited_for():
    found = cluster(2, link=1e4)
    idle = compute_utilization(simulate(found, staged(found, [1, 1], 4)))[1].idle_s
    assert idle["message"] > 2 * idle["other stage"] > 0


def sent_s(found: Profile, plan: Plan) -> list[float]:
    """How long the messages of each action take."""
    events = simulate(found, plan).events
    return [event.end - event.start for event in events if event.kind == "send"]


def test_messages_of_a_wave_go_over_a_link_one_after_the_other():
    """The first two workers have four samples and two, the others two and four."""
    found = cluster(4, link=1e6, per_host=2)
    plan = staged(found, [2, 2], 6, counts=((4, 2), (2, 4)), zero_stage=3)
    assert sent_s(found, plan) == [pytest.approx(6 * MESSAGE / 1e6, rel=0.01)] * 2


def test_each_of_a_tp_group_on_another_host_gets_a_message_of_its_own():
    found = with_tp_groups(cluster(4, link=1e6, per_host=2), 2, faster=2.0)
    plan = staged(found, [2, 2], 4, tp=TensorParallelDegree(2))
    assert [stage.tensor for stage in plan.stages] == [2, 2]
    assert sent_s(found, plan) == [pytest.approx(2 * MESSAGE / 1e6, rel=0.01)] * 8


def test_inside_a_host_messages_do_not_hinder_each_other():
    found = with_tp_groups(cluster(4, link=1e6, per_host=4), 2, faster=2.0)
    plan = staged(found, [2, 2], 4, tp=TensorParallelDegree(2))
    assert sent_s(found, plan) == [pytest.approx(MESSAGE / 1e6, rel=0.01)] * 8


def test_the_trace_names_stages():
    found = cluster(2)
    plan = staged(found, [1, 1], 4)
    names = {one.name for one in build_trace(simulate(found, plan), plan).traceEvents}
    assert {"forward stage 1", "backward stage 2", "send stage 1"} <= names
