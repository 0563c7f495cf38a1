"""A plan of several stages whose devices take other times than it says: whether it is made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.predict import predict
from gpumix.hardware.estimates.what_if import scale_memory, with_slower
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.cluster.network import Link
from gpumix.schema.cluster.network import Network as StatedNetwork
from gpumix.schema.errors import PlanOutdated
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import Profile
from gpumix.train.elastic.device_pace import with_samples_in
from gpumix.train.elastic.replan_stages import WINDOW_STEPS, MicroBatchExchange, StageReplanner
from helpers.extended import every_second
from helpers.plans.profiles import Card, block, in_a_row, line, profile, steady

BATCH, STEPS = 16, 10_000
# A small model: these tests ask whether the run is planned again, not which plan is found.
SPACE = Space(
    zero_stages=(1,),
    shardings=("all",),
    gradient_checkpointing=(True,),
    checkpoints_on=("device",),
    orders=("layered",),
    cross_entropy=("whole",),
    state_on=("device",),
    tensor_parallel_size=(1,),
    pipeline_schedules=("1f1b",),
    leave_out=False,
)


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
    """Each device is a stage, and computes as long as the others."""
    return by_hand(
        measured,
        [(0, 2, ("b-0",)), (2, 4, ("b-1",)), (4, 8, ("a-0",)), (8, 12, ("a-1",))],
    )


def by_hand(
    measured: Profile, rows: Sequence[tuple[int, int, Sequence[str]]], **changes: object
) -> Plan:
    """A plan whose stages have the calls from one number to another, and such devices, each of
    which has as many micro-batches."""
    found = []
    for begin, end, devices in rows:
        workers = tuple(
            Worker(
                device=device,
                device_class=device[0],
                samples=BATCH // len(devices),
                micro_batch=1,
                state_share=1 / len(devices),
            )
            for device in devices
        )
        own = measured.model.needs_of(begin, end)
        units = measured.model.calls[begin:end]
        found.append(Stage(units=units, workers=workers, root=own.root, takes=own.outputs))
    made = Plan(
        strategy="by hand",
        model=measured.model.fingerprint,
        sequence_length=measured.sequence_length,
        global_batch=BATCH,
        stages=tuple(found),
        zero_stage=1,
        **changes,
    )
    return made.model_copy(update={"prediction": predict(measured, made)})


class Planner:
    """Notes the plans that it makes: by default one by which a step takes a tenth of the time."""

    def __init__(self, staged: Plan, make: Callable[[Profile], Plan] | None = None) -> None:
        assert staged.prediction is not None
        quick = {"step_s": 0.1 * staged.prediction.step_s}
        prediction = staged.prediction.model_copy(update=quick)
        faster = staged.model_copy(update={"prediction": prediction})
        self._make = make or (lambda found: faster)
        self.made: list[Plan] = []

    def __call__(self, found: Profile) -> Plan:
        self.made.append(self._make(found))
        return self.made[-1]


def watched(staged, measured, *, steps: int = STEPS, planner: Planner | None = None):
    return StageReplanner(staged, measured, replan=planner or Planner(staged), steps=steps)


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


def found_in(watch: StageReplanner, seconds: list[float], steps: int = 3 * WINDOW_STEPS):
    every = [watch.observe(seconds) for _ in range(steps)]
    return [one for one in every if one is not None]


@pytest.mark.parametrize("all_of", [0.5, 1.0, 3.0])
def test_who_is_as_planned_against_the_others_stays(staged, measured, all_of):
    watch = watched(staged, measured)
    assert not found_in(watch, times(staged, {"a-0": 1.1}, all_of), 200)


@pytest.mark.parametrize("factor", every_second([3.0, 0.3]))
def test_a_device_that_takes_other_times_makes_another_plan(staged, measured, factor):
    device, planner = staged.workers[-1].device, Planner(staged, replan)
    watch = watched(staged, measured, planner=planner)
    (error,) = found_in(watch, times(staged, {device: factor}, 1.3))
    assert error.slower == {device: pytest.approx(factor, rel=0.01)}
    assert f"device '{device}' takes {factor:.2f} times as long" in error.what
    (new,) = planner.made
    assert (work_of(new)[device] < work_of(staged)[device]) is (factor > 1)


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
    planner = Planner(staged)
    watch = watched(staged, measured, steps=4 * WINDOW_STEPS, planner=planner)
    for step in range(4 * WINDOW_STEPS - 1):
        watch.observe([s * 1e-6 for s in times(staged, {"a-0": 1.5 + 1e-4 * step})])
    assert len(planner.made) == 1


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


# -- micro-batches of a stage's workers ------------------------------------------------------------


def in_two_stages(measured: Profile, **changes: object) -> Plan:
    """The slow class first; then the fast one."""
    rows = [(0, 4, ("b-0", "b-1")), (4, 12, ("a-0", "a-1"))]
    return by_hand(measured, rows, **changes)


def live(plan: Plan, measured: Profile) -> StageReplanner:
    return StageReplanner(plan, measured, replan=None, steps=STEPS)


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3, "waves": 2}])
def test_workers_of_a_stage_share_its_micro_batches_anew(measured, settings):
    plan = Plan.model_validate(in_two_stages(measured).model_dump() | settings)
    plan = plan.model_copy(update={"prediction": predict(measured, plan)})
    watch = live(plan, measured)
    (change,) = found_in(watch, times(plan, {"b-1": 3.0}))
    assert isinstance(change, MicroBatchExchange)
    assert [[w.samples for w in stage.workers] for stage in change.plan.stages] == [
        [12, 4],
        [8, 8],
    ]
    Plan.model_validate(change.plan.model_dump())
    assert change.after_s < 0.9 * change.before_s
    # It stays so while the device is slow, and all is as before when it is not.
    assert not found_in(watch, times(change.plan, {"b-1": 3.0}), 100)
    (back,) = found_in(watch, times(change.plan))
    assert [[w.samples for w in stage.workers] for stage in back.plan.stages] == [[8, 8], [8, 8]]
    assert not found_in(watch, times(back.plan), 100)


def test_where_layers_should_move_the_run_starts_by_another_plan(measured):
    """Both devices of a stage are slow: among themselves they have nothing to share."""
    plan = in_two_stages(measured)
    slow = times(plan, {"b-0": 4.0, "b-1": 4.0})
    assert not found_in(live(plan, measured), slow)
    (error,) = found_in(watched(plan, measured), slow)
    assert isinstance(error, PlanOutdated)


def test_no_worker_gets_more_than_it_has_memory_for(measured):
    plan = in_two_stages(measured, schedule="gpipe")  # where all micro-batches wait

    def peak_of(samples: int, found: Profile) -> int:
        dealt = with_samples_in(plan, [[samples, BATCH - samples], [8, 8]])
        expected = predict(found, dealt).workers
        return next(w.peak_bytes for w in expected if w.device == "b-0")

    assert peak_of(12, measured) > peak_of(11, measured)
    expected = next(w for w in plan.prediction.workers if w.device == "b-0")
    part = (peak_of(11, measured) + 1) / expected.memory_limit_bytes
    tight = scale_memory(measured, {"b": part})
    (change,) = found_in(live(plan, tight), times(plan, {"b-1": 3.0}))
    found = change.plan.stages[0].workers[0].samples
    limits = {w.device: w.memory_limit_bytes for w in change.plan.prediction.workers}
    assert 8 < found < 12
    assert peak_of(found, tight) <= limits["b-0"] < peak_of(found + 1, tight)


def test_a_device_that_is_slow_now_and_then_is_dealt_with_less_and_less_often(measured):
    plan = in_two_stages(measured)
    watch, now, changes = live(plan, measured), plan, 0
    for turn in range(100):
        slow = {"b-1": 3.0} if turn % 2 == 0 else {}
        for change in found_in(watch, times(now, slow), 2 * WINDOW_STEPS):
            now, changes = change.plan, changes + 1
    assert 1 <= changes <= 3
