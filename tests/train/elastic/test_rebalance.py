"""How samples are split anew by what steps took: the best split, soon, and not again and again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.train.elastic.device_pace import DevicePace, split_samples
from gpumix.train.elastic.rebalance_memory import with_shares
from gpumix.train.elastic.rebalancer import (
    FAILED_STEPS,
    WINDOW_STEPS,
    MovedShares,
    Rebalancer,
    SplitChange,
    SplitLimits,
)
from gpumix.train.elastic.sample_dealer import with_samples
from helpers.runs.jobs import metrics, plan_for, toy, train, write_job

PLENTY = 10**6
TOTAL = 48


def plan(*samples: int, micro_batch: int = 4, tensor: int = 1) -> Plan:
    """Of devices d0, d1, ..., in tensor-parallel groups of `tensor` with so many samples each."""
    counts = [n for n in samples for _ in range(tensor)]
    workers = tuple(
        Worker(
            device=f"d{number}",
            device_class="card",
            samples=n,
            micro_batch=min(n, micro_batch),
            state_share=1 / len(samples),
        )
        for number, n in enumerate(counts)
    )
    return Plan(
        strategy="by hand",
        model="m",
        sequence_length=8,
        global_batch=sum(samples),
        stages=(Stage(units=("unit",), workers=workers, tensor=tensor),),
    )


class Roomy:
    """Memory for so many samples, and for any if state moves, which takes `moving_s`: None if it
    does not."""

    def __init__(self, most: list[int]) -> None:
        self.most = most
        self.moving_s: float | None = None
        self.asked = 0

    def fits(self, samples: Sequence[int]) -> bool:
        return True

    def moved(self, paces: Sequence[DevicePace]) -> MovedShares | None:
        self.asked += 1
        if self.moving_s is None:
            return None
        samples = split_samples(TOTAL, paces, [PLENTY] * len(paces))
        assert samples is not None
        return MovedShares(samples, (0.1, 0.2, 0.3, 0.4), self.moving_s)


class Run:
    """Devices of which each takes a time for every sample."""

    def __init__(
        self,
        *samples: int,
        most: int = PLENTY,
        noise: float = 0.0,
        steps: int = 10**6,
        idle: dict[int, DevicePace] | None = None,
    ) -> None:
        self.room = Roomy([most] * len(samples))
        self.rebalancer = Rebalancer(plan(*samples), self.room, steps=steps, idle=idle or {})
        self.sample_s = [1.0] * len(samples)
        self.noise, self.chance = noise, random.Random(3)
        self._before = [0.0] * len(samples)

    def steps(self, number: int) -> list[tuple[int, SplitChange]]:
        """After which the samples were split anew. What a rank tells is of the step before."""
        found = []
        for step in range(number):
            seconds = [
                n * each * (1.0 + self.noise * self.chance.random())
                for n, each in zip(self.rebalancer.samples, self.sample_s)
            ]
            change = self.rebalancer.observe(self._before)
            self._before = seconds
            if change is not None:
                found.append((step, change))
        return found


# -- which split -----------------------------------------------------------------------------------


@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(0.1, 5), st.integers(0, 12)), min_size=1, max_size=4
    ),
)
def test_the_split_is_that_of_brute_force(total, groups):
    paces, most = [DevicePace(a, b) for a, b, _ in groups], [limit for _, _, limit in groups]
    choices = [range(1, limit + 1) if limit else (0,) for limit in most]
    whole = [counts for counts in itertools.product(*choices) if sum(counts) == total]
    found = split_samples(total, paces, most)
    if not whole:
        assert found is None
        return
    assert found in whole

    def takes(counts: tuple[int, ...]) -> float:
        return max(pace.seconds(n) for pace, n in zip(paces, counts) if n)

    assert takes(found) == pytest.approx(min(map(takes, whole)))


def test_micro_batches_stay_as_large_as_the_plan_has_them():
    changed = with_samples(plan(8, 8), (3, 13))
    assert [(w.samples, w.micro_batch, w.micro_batches) for w in changed.workers] == [
        (3, 3, (3,)),
        (13, 4, (4, 4, 4, 1)),
    ]
    assert Plan.model_validate(changed.model_dump()) == changed


# -- when ------------------------------------------------------------------------------------------


def test_a_device_that_slows_down_gets_fewer_samples_within_five_steps():
    run = Run(12, 12, 12, 12)
    assert run.steps(20) == []
    run.sample_s[3] = 3.0
    ((step, change),) = run.steps(40)
    assert step <= WINDOW_STEPS
    assert change.samples == (14, 14, 14, 6) or max(change.samples) <= 15
    assert change.before_s == 36.0
    assert change.after_s == max(*change.samples[:3], 3 * change.samples[3])
    assert change.why == "device 'd3' takes 3.00 times as long as the others, against the plan"
    run.sample_s[3] = 1.0
    ((step, change),) = run.steps(40)
    assert step <= WINDOW_STEPS
    assert change.samples == (12, 12, 12, 12)


def test_what_has_lost_is_undone_and_says_what_was_lost():
    run = Run(12, 12, 12, 12)
    run.sample_s[3] = 3.0
    ((_, change),) = run.steps(WINDOW_STEPS + 1)
    run.sample_s[3] = 1.0
    ((_, undone),) = run.steps(40)
    assert undone.samples == (12, 12, 12, 12)
    took = max(change.samples)
    told = f"the last split is undone: by it steps took {took}.00 s instead of 12.00 s"
    assert undone.why == told


def test_what_a_host_cannot_read_is_not_given_to_its_device():
    """The first device computes three times as fast, and its host reads half as many samples a
    second as the second one computes: a plan that knows is left alone, and one that does not is
    put right."""
    reads = {"fast": 0.5}

    def observed(*samples: int) -> tuple[int, ...]:
        (stage,) = plan(*samples).stages
        workers = tuple(
            worker.model_copy(update={"host": host})
            for worker, host in zip(stage.workers, ("fast", "slow"))
        )
        known = plan(*samples).model_copy(
            update={"stages": (stage.model_copy(update={"workers": workers}),)}
        )
        room = Roomy([PLENTY] * 2)
        rebalancer = Rebalancer(known, room, steps=10**6, read_per_s=reads)
        for _ in range(2 * WINDOW_STEPS):
            rebalancer.observe([n * s for n, s in zip(rebalancer.samples, (1 / 3, 1.0))])
        return rebalancer.samples

    best = min(range(1, TOTAL), key=lambda n: max(n / 3, n / reads["fast"], TOTAL - n))
    assert observed(best, TOTAL - best) == (best, TOTAL - best)
    assert observed(36, 12) == (best, TOTAL - best)
    reads = {}
    assert observed(best, TOTAL - best) == (36, 12)


def test_a_step_that_takes_long_once_changes_nothing():
    run = Run(12, 12, 12, 12)
    run.steps(5)
    for _ in range(6):
        run.sample_s[1] = 5.0
        assert run.steps(1) == []
        run.sample_s[1] = 1.0
        assert run.steps(4) == []


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.5])
def test_noise_changes_nothing_for_long(noise):
    """Where a half of each step's time is noise, some changes seem right for a while."""
    run = Run(12, 12, 12, 12, noise=noise)
    changes = [step for step, _ in run.steps(400)]
    assert len(changes) <= {0.05: 0, 0.2: 0, 0.5: 10}[noise]


def test_a_slow_device_among_noise_is_found():
    run = Run(12, 12, 12, 12, noise=0.2)
    run.steps(20)
    run.sample_s[0] = 2.0
    found = run.steps(30)
    assert 1 <= len(found) <= 2
    assert run.rebalancer.samples[0] < 9


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 24, 40])
def test_a_device_that_is_slow_now_and_then_is_followed_only_where_that_pays(period, slower):
    """Steps are counted that pass between the changes, too late as they are."""
    run = Run(12, 12, 12, 12)
    taken_s, changes, turns = 0.0, 0, 1200 // period
    for turn in range(turns):
        run.sample_s[3] = slower if turn % 2 == 0 else 1.0
        for _ in range(period):
            taken_s += max(n * s for n, s in zip(run.rebalancer.samples, run.sample_s))
            changes += len(run.steps(1))
    left_s = sum(12 * (slower if turn % 2 == 0 else 1.0) * period for turn in range(turns))
    assert changes <= 6 or taken_s < 0.96 * left_s
    assert taken_s <= 1.01 * left_s


def test_what_would_gain_little_is_left():
    run = Run(12, 12, 12, 12)
    run.sample_s[2] = 1.08
    assert run.steps(50) == []


def test_no_device_gets_more_than_it_has_memory_for():
    run = Run(12, 12, 12, 12, most=14)
    run.sample_s[3] = 10.0
    ((_, change),) = run.steps(20)
    assert change.samples == (14, 14, 14, 6)


def test_who_has_no_samples_gets_none_and_who_has_some_keeps_one():
    run = Run(4, 4, 0)
    run.sample_s[0] = 1000.0
    ((_, change),) = run.steps(20)
    assert change.samples == (1, 7, 0)


def test_who_has_no_samples_but_a_pace_gets_some_when_another_becomes_slow():
    """A sample of its takes longer than a step of the others: when all are as before it has none
    again."""
    run = Run(12, 12, 12, 0, idle={3: DevicePace(0.0, 14.0)})
    run.sample_s[3] = 14.0
    assert run.steps(50) == []
    run.sample_s[0] = 6.0
    ((_, change),) = run.steps(50)
    assert change.samples[3] == 1
    assert change.after_s == min(
        max(6 * a, b, 36 - a - b - d, 14 * d)
        for a, b, d in itertools.product(range(1, 13), range(1, 23), range(2))
    )
    run.sample_s[0] = 1.0
    run.steps(50)
    assert run.rebalancer.samples == (12, 12, 12, 0)


def test_an_idle_device_is_taken_to_be_off_as_the_others_are():
    """The profile says of all that they are three times as fast as they are."""
    run = Run(4, 4, 0, idle={2: DevicePace(0.0, 3.0)})
    run.sample_s = [3.0, 3.0, 9.0]
    assert run.steps(50) == []


def test_steps_that_do_not_count_are_no_evidence():
    rebalancer = Rebalancer(plan(4, 4), SplitLimits([PLENTY] * 2), steps=100)
    for _ in range(20):
        assert rebalancer.observe([12.0, 4.0]) is None
        assert rebalancer.observe([12.0, 4.0]) is None
        assert rebalancer.observe([0.0, 4.0]) is None


def test_of_a_tp_group_the_slowest_counts():
    rebalancer = Rebalancer(plan(8, 8, tensor=2), SplitLimits([PLENTY] * 2), steps=100)
    changes = [rebalancer.observe([8.0, 24.0, 8.0, 8.0]) for _ in range(WINDOW_STEPS)]
    assert changes[:-1] == [None] * (WINDOW_STEPS - 1)
    assert changes[-1] is not None
    assert changes[-1].samples == (4, 12)


def test_ranks_need_not_have_the_order_of_tp_groups():
    made = plan(8, 8, tensor=2)
    apart = Plan.model_validate(made.model_dump() | {"ranks": ("d0", "d2", "d1", "d3")})
    rebalancer = Rebalancer(apart, SplitLimits([PLENTY] * 2), steps=100)
    changes = [rebalancer.observe([8.0, 8.0, 24.0, 8.0]) for _ in range(WINDOW_STEPS)]
    assert changes[-1] is not None
    assert changes[-1].samples == (4, 12)


# -- where memory stands in the way ----------------------------------------------------------------


def slowed(**room: object) -> Run:
    """Devices that have memory for a sample more each; the last takes three times as long."""
    run = Run(12, 12, 12, 12, most=13, **room)
    run.steps(5)
    run.sample_s[3] = 3.0
    return run


def test_state_moves_where_that_takes_less_time():
    run = slowed()
    run.room.moving_s = 100.0
    ((_, change),) = run.steps(20)
    assert change.samples == (15, 15, 14, 4)
    assert change.shares == (0.1, 0.2, 0.3, 0.4)
    assert change.moving_s == 100.0


@pytest.mark.parametrize("moving_s", [None, 1e9])
def test_state_stays_where_it_cannot_move_or_that_takes_too_long(moving_s):
    run = slowed()
    run.room.moving_s = moving_s
    ((_, change),) = run.steps(20)
    assert change.samples == (13, 13, 13, 9)
    assert change.shares is None


@pytest.mark.parametrize("brought", [True, False])
def test_a_move_that_did_not_bring_what_it_should_makes_the_next_change_ask_for_more(brought):
    run = slowed()
    run.room.moving_s, run.sample_s[3] = 0.0, 100.0
    changes: list[tuple[int, SplitChange]] = []
    while not changes:
        changes = run.steps(1)
    ((_, change),) = changes
    assert change.shares is not None and change.samples[3] == 1
    run.rebalancer.go_on(
        with_shares(plan(*change.samples), change.shares), SplitLimits([PLENTY] * 4)
    )
    if not brought:
        run.sample_s[3] = change.before_s
    assert run.steps(40) == []  # it keeps one
    run.sample_s[3] = 1.0
    step, _ = run.steps(40)[0]
    assert (step >= WINDOW_STEPS + FAILED_STEPS - 1) is not brought


def test_state_stays_where_few_steps_are_left():
    run = slowed(steps=12)
    run.room.moving_s = 30.0
    ((_, change),) = run.steps(7)
    assert change.shares is None


def test_it_is_not_asked_again_and_again_whether_state_can_move():
    run = slowed()
    run.steps(100)
    assert run.room.asked <= 2


def test_where_samples_have_room_nobody_asks():
    run = Run(12, 12, 12, 12)
    run.sample_s[3] = 3.0
    ((_, change),) = run.steps(20)
    assert change.shares is None
    assert run.room.asked == 0


def test_what_has_moved_is_gone_on_from():
    """A device that stores less updates less: what it takes besides its samples is the new
    plan's."""
    run = slowed()
    run.room.moving_s = 0.0
    ((_, change),) = run.steps(20)
    run.rebalancer.go_on(
        with_shares(plan(*change.samples), change.shares), SplitLimits([PLENTY] * 4)
    )
    assert run.steps(50) == []
    run.sample_s[3] = 1.0
    ((_, change),) = run.steps(20)
    assert change.samples == (12, 12, 12, 12)


# -- in a run --------------------------------------------------------------------------------------


def in_waves(one: Plan, waves: int) -> Plan:
    """The plan with a micro-batch of each worker in each wave."""
    (stage,) = one.stages
    workers = [
        worker.model_copy(update={"micro_batch": worker.samples // waves})
        for worker in stage.workers
    ]
    stages = (stage.model_copy(update={"workers": tuple(workers)}),)
    return Plan.model_validate(one.model_dump() | {"stages": stages, "waves": waves})


@pytest.mark.parametrize("waves", [1, 2])
def test_a_run_splits_its_samples_anew_and_has_the_same_losses(tmp_path, waves):
    """Rank 1 sleeps over each of its samples, which the plan does not know."""
    usual = {"max_steps": 20, "global_batch_size": 16, "rebalance": True}
    job = write_job(tmp_path, model=toy(rank=1, sample_s=0.05), **usual)
    planned = in_waves(plan_for(job, (6, 6, 4)), waves)
    train(job, plan=planned)
    changes = metrics(tmp_path / "run", "plan")  # a busy machine may bring others, also before
    assert changes[0]["samples_before"] == {"big-0": 6, "small-0": 6, "small-1": 4}
    change = min(changes, key=lambda one: one["samples"]["small-0"])
    assert change["samples"]["small-0"] < 4
    assert "'small-0'" in change["why"]
    effect = metrics(tmp_path / "run", "rebalanced")[changes.index(change)]
    assert effect["step_s"] < effect["step_before_s"]
    assert effect["steps"] > 0

    still = write_job(tmp_path / "still", **usual | {"rebalance": False})
    train(still, plan=planned)
    assert metrics(tmp_path / "still" / "run", "plan") == []
    mine, others = (metrics(f / "run") for f in (tmp_path, tmp_path / "still"))
    assert [one["loss"] for one in mine] == pytest.approx([one["loss"] for one in others], rel=1e-6)
    assert [one["tokens"] for one in mine] == [one["tokens"] for one in others]
