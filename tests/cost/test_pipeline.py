"""Orders of pipelines: nothing is left out, nobody waits for ever, bubbles are as in textbooks."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumix.cost.pipeline_schedule import (
    NO_TRANSFER,
    Action,
    MicroBatchSchedule,
    StageAssignment,
    replay,
)
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, StageInput, Worker

SCHEDULES = ["gpipe", "1f1b", "eager-1f1b", "zero-bubble"]


def pipeline(schedule: str, counts: list[list[int]]) -> MicroBatchSchedule:
    """Of stages by the number of micro-batches of each of their workers, all on ranks of their
    own."""
    stages, rank = [], 0
    for number, of_stage in enumerate(counts):
        ends = list(accumulate(of_stage))
        seats = [
            StageAssignment(number, rank + n, range(end - count, end))
            for n, (count, end) in enumerate(zip(of_stage, ends))
        ]
        rank += len(of_stage)
        stages.append(tuple(seats))
    return MicroBatchSchedule(schedule, tuple(stages))


def round_robin(ranks: int, rounds: int, batches: int) -> MicroBatchSchedule:
    """Stages that go round the same ranks."""
    seats = [(StageAssignment(n, n % ranks, range(batches)),) for n in range(ranks * rounds)]
    return MicroBatchSchedule("interleaved", tuple(seats))


def step_s(found: MicroBatchSchedule, *, forward_s=1.0, backward_s=2.0) -> float:
    """Of equal stages on a network that takes no time."""
    splits = found.schedule == "zero-bubble"
    seconds = {"forward": forward_s, "backward": backward_s / (1 + splits), "weights": 1.0}
    times = replay(found.orders, found.needs, lambda a: seconds[a.kind], lambda a, b: NO_TRANSFER)
    return times.step_s


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("batches", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_equal_stages_wait_as_the_textbook_says(schedule, stages, batches):
    found = step_s(pipeline(schedule, [[batches]] * stages))
    bubble = 1 - 3.0 * batches / found
    assert bubble == pytest.approx((stages - 1) / (batches + stages - 1))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("rounds", [2, 3])
def test_going_round_divides_the_bubble(stages, rounds):
    """Narayanan et al. 2021: by the number of stages of each rank."""
    batches = 4 * stages
    found = step_s(
        round_robin(stages, rounds, batches), forward_s=1 / rounds, backward_s=2 / rounds
    )
    bubble = 1 - 3.0 * batches / found
    least = (stages - 1) / rounds
    assert bubble == pytest.approx(least / (batches + least), rel=0.05)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_weights_fill_bubbles(stages):
    """Qi et al.: a third of 1F1B's, where all three parts take as long."""
    batches = 2 * stages
    found = step_s(pipeline("zero-bubble", [[batches]] * stages))
    assert found == pytest.approx(3.0 * batches + stages - 1)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_no_more_waits_than_there_are_stages_to_come(stages):
    found = pipeline("1f1b", [[16]] * stages)
    assert [most_in_flight(found, rank) for rank in range(stages)] == list(range(stages, 0, -1))


def most_in_flight(found: MicroBatchSchedule, rank: int) -> int:
    kinds = {"forward": 1, "backward": -1, "weights": 0}
    return max(accumulate((kinds[a.kind] for a in found.orders[rank]), initial=0))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("counts", [[[4, 4, 4], [12]], [[12], [4, 4, 4]], [[12], [4, 4, 4], [12]]])
def test_all_workers_of_a_stage_are_busy_at_once(schedule, counts):
    """Not one after the other, as they would be if others took micro-batches by their numbers."""
    found = pipeline(schedule, counts)
    splits = found.schedule == "zero-bubble"
    seconds = {"forward": 1.0, "backward": 2.0 / (1 + splits), "weights": 1.0}
    share = {len(seats): 1.0 / len(seats) for seats in found.seats}

    def takes(action: Action) -> float:
        return seconds[action.kind] / share[len(found.seats[action.stage])]

    times = replay(found.orders, found.needs, takes, lambda a, b: NO_TRANSFER)
    busy = 12 * 3.0
    assert times.step_s < 1.5 * busy


@st.composite
def counts_of_stages(draw):
    """Of one to three workers in each of two to four stages: how they share the micro-batches."""
    batches = draw(st.integers(1, 9))
    stages = []
    for _ in range(draw(st.integers(2, 4))):
        cuts = draw(st.lists(st.integers(0, batches), max_size=2))
        ends = [0, *sorted(cuts), batches]
        stages.append([b - a for a, b in pairwise(ends)])
    return stages


@settings(deadline=None)
@given(st.sampled_from(SCHEDULES), counts_of_stages())
def test_everything_is_done_once_and_nobody_waits_for_ever(schedule, counts):
    found = pipeline(schedule, counts)
    kinds = ["forward", "backward", *(["weights"] if schedule == "zero-bubble" else [])]
    for seats in found.seats:
        for seat in seats:
            wanted = {Action(kind, seat.stage, batch) for kind in kinds for batch in seat.batches}
            assert sorted(found.orders.get(seat.rank, ())) == sorted(wanted)
    if schedule != "gpipe":
        for rank in found.ranks:
            assert most_in_flight(found, rank) <= found.in_flight.get(rank, 0)
    step_s(found)  # raises if two wait for each other
    sends_in_order(found)


def sends_in_order(found: MicroBatchSchedule) -> None:
    """What two ranks send each other comes in the order in which it is taken."""
    for stage in range(1, len(found.seats)):
        for kind, giver_stage, taker_stage in (
            ("forward", stage - 1, stage),
            ("backward", stage, stage - 1),
        ):
            for giver in found.seats[giver_stage]:
                for taker in found.seats[taker_stage]:
                    between = set(giver.batches) & set(taker.batches)
                    orders = [
                        [
                            a.batch
                            for a in found.orders.get(seat.rank, ())
                            if (a.kind, a.stage) == (kind, seat.stage) and a.batch in between
                        ]
                        for seat in (giver, taker)
                    ]
                    assert orders[0] == orders[1]


@settings(deadline=None)
@given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 9))
def test_going_round_ends(ranks, rounds, batches):
    found = round_robin(ranks, rounds, batches)
    assert sum(map(len, found.orders.values())) == 2 * ranks * rounds * batches
    step_s(found)


def test_unequal_workers_go_round_without_waiting_for_each_other():
    """Two of a group's workers have micro-batches, unlike many; the other group has one worker."""
    ranks = {0: [(0, range(0)), (1, range(2)), (2, range(2, 3))], 1: [(3, range(3))]}
    seats = tuple(
        tuple(StageAssignment(stage, rank, batches) for rank, batches in ranks[stage % 2])
        for stage in range(4)
    )
    found = MicroBatchSchedule("interleaved", seats)
    done = [action for order in found.orders.values() for action in order]
    assert len(done) == len(set(done)) == 2 * 4 * 3
    assert step_s(found) > 0


@st.composite
def plans_in_waves(draw: st.DrawFn, schedule: str) -> Plan:
    """Workers of two stages, or of two on each of two groups, with unlike many micro-batches."""
    count, stages = draw(st.integers(2, 9)), []
    for number in range(2):
        ends = [0, draw(st.integers(0, count)), count]
        workers = tuple(
            Worker(
                device=f"d{number}{n}",
                device_class="one",
                samples=dealt,
                micro_batch=min(dealt, 1),
                state_share=1 / (len(ends) - 1),
            )
            for n, dealt in enumerate(b - a for a, b in pairwise(ends))
        )
        stages.append(workers)
    most = min(max(w.samples for w in workers) for workers in stages)
    rounds = 2 if schedule == "interleaved" else 1
    return Plan(
        strategy="test",
        model="model",
        sequence_length=1,
        global_batch=count,
        schedule=schedule,
        zero_stage=2,
        waves=draw(st.integers(1, most)),
        stages=tuple(
            Stage(
                units=(f"u{n}",),
                workers=workers,
                takes=(StageInput(call=n - 1, output=0),) if n else (),
            )
            for n, workers in enumerate(stages * rounds)
        ),
    )


@settings(deadline=None)
@given(st.data())
@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved"])
def test_each_micro_batch_of_a_wave_comes_through_all_stages(schedule, data):
    """Also where it is in another wave of one stage than of the next one."""
    plan = data.draw(plans_in_waves(schedule))
    found = MicroBatchSchedule.of(plan)
    waves = [[one.wave for one in stage.micro_batches(plan.waves)] for stage in plan.stages]
    left = {rank: list(order) for rank, order in found.orders.items()}
    done: set[tuple[str, int, int]] = set()

    def has_all(action: Action) -> bool:
        there = action.stage + {"forward": -1, "backward": 1, "weights": 0}[action.kind]
        kind = "backward" if action.kind == "weights" else action.kind
        own = [n for n, wave in enumerate(waves[action.stage]) if wave == action.batch]
        outside = there not in range(len(waves))
        return outside or all((kind, there, batch) in done for batch in own)

    while ready := [rank for rank, order in left.items() if order and has_all(order[0])]:
        for rank in ready:
            action = left[rank].pop(0)
            own = (n for n, wave in enumerate(waves[action.stage]) if wave == action.batch)
            done |= {(action.kind, action.stage, batch) for batch in own}
    assert not any(left.values())
