"""Laws of the events: nobody does two things at once, and all ranks do collectives together."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.schema.plan.stage import Mode
from gpumix.simulate.events import simulate
from gpumix.simulate.program import build_program
from gpumix.simulate.timeline import compute_utilization
from helpers.draws import examples
from helpers.paths import TESTS
from helpers.plans.brute import small_profiles
from helpers.plans.profiles import fleet
from helpers.plans.replays import any_plans, cards, on_stream, plan_by_hand, wire

EASY = examples(6)


@EASY
@given(small_profiles(), st.data())
def test_nothing_overlaps_on_a_stream(profile, data):
    replay = simulate(profile, data.draw(any_plans(profile)))
    for lane in range(len(replay.program.lanes)):
        for events in on_stream(replay, lane).values():
            assert all(one.end <= other.start for one, other in pairwise(events))


@EASY
@given(small_profiles(), st.data())
def test_busy_and_idle_are_the_step(profile, data):
    replay = simulate(profile, data.draw(any_plans(profile)))
    for use in compute_utilization(replay):
        assert use.busy_s + sum(use.idle_s.values()) == pytest.approx(replay.step_s)
        assert min(use.idle_s.values()) >= 0


@EASY
@given(small_profiles(), st.data())
def test_idle_times_lie_between_what_is_computed(profile, data):
    replay = simulate(profile, data.draw(any_plans(profile)))
    waits = list(replay.idle)
    for lane in range(len(replay.program.lanes)):
        spans = [(event.start, event.end) for event in on_stream(replay, lane)["compute"]]
        spans += [(wait.start, wait.end) for wait in waits if wait.lane == lane]
        spans.sort()
        assert all(one[1] == other[0] for one, other in pairwise(spans))


@EASY
@given(small_profiles(), st.data())
def test_collectives_start_when_all_have_issued_them(profile, data):
    replay = simulate(profile, data.draw(any_plans(profile)))
    for lane_number, lane in enumerate(replay.program.lanes):
        own = on_stream(replay, lane_number)
        finished = [event.end for event in own["compute"] + own["copies"]]
        counted = [task for task in lane.tasks if task.seconds > 0 or task.copied_s > 0]
        assert len(finished) == sum((t.seconds > 0) + (t.copied_s > 0) for t in counted)
        for (start, _), issued in zip(replay.moved, lane.issued, strict=True):
            keys = {(t.kind, t.call, t.micro_batches) for t in lane.tasks[:issued]}
            before = [
                event.end
                for event in own["compute"]
                if (event.kind, event.call, event.micro_batches) in keys
            ]
            if lane.worker.mode.order == "layered":
                assert all(end <= start for end in before)
    assert all(one[1] <= other[0] for one, other in pairwise(replay.moved))


@EASY
@given(small_profiles(), st.data())
def test_units_are_computed_with_their_parameters(profile, data):
    """At stage 3: after their gather, and no more than the next one is gathered ahead."""
    replay = simulate(profile, data.draw(any_plans(profile, (3,))))
    gathered = {(c.kind, c.call): span for c, span in zip(replay.program.collectives, replay.moved)}
    for event in replay.events:
        if event.kind == "forward" and event.call >= 0 and ("gather", event.call) in gathered:
            assert gathered["gather", event.call][1] <= event.start
        if event.kind == "forward" and ("gather", event.call + 2) in gathered and event.call >= 0:
            assert event.end <= gathered["gather", event.call + 2][0]
        if event.kind == "backward" and ("regather", event.call) in gathered:
            assert gathered["regather", event.call][1] <= event.start
        if event.kind == "backward" and ("regather", event.call - 2) in gathered:
            assert event.call < 2 or event.end <= gathered["regather", event.call - 2][0]


def test_collectives_are_issued_in_the_order_of_the_engine():
    measured = cards((1.0, 2.0), calls=3, network=wire(1.0, 1.0))
    for samples in ((2, 2), (4, 0)):
        program = build_program(measured, plan_by_hand(measured, samples))
        assert [(c.kind, c.call) for c in program.collectives] == [
            ("gather", -1), ("gather", 0), ("gather", 1), ("gather", 2),
            ("regather", 1), ("reduce", 2), ("regather", 0), ("reduce", 1), ("reduce", 0),
            ("reduce", -1), ("meet", -1),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("zero_stage", "gathers", "regathers", "reductions"), [(0, 0, 0, 4), (1, 4, 0, 4), (3, 4, 2, 4)]
)
def test_collectives_of_each_stage(zero_stage, gathers, regathers, reductions):
    measured = cards((1.0, 2.0), calls=3, network=wire(1.0, 1.0))
    program = build_program(measured, plan_by_hand(measured, (2, 2), zero_stage=zero_stage))
    kinds = [c.kind for c in program.collectives]
    assert kinds.count("gather") == gathers
    assert kinds.count("regather") == regathers
    assert kinds.count("reduce") == reductions


def test_one_after_the_other_each_micro_batch_is_an_event():
    measured = cards((1.0, 1.0), calls=2, network=wire(1.0, 1.0))
    modes = (Mode(order="sequential"), Mode())
    plan = plan_by_hand(measured, (5, 5), micro_batch=2, zero_stage=1, modes=modes)
    replay = simulate(measured, plan)
    sequential, layered = (
        [e.micro_batches for e in on_stream(replay, lane)["compute"] if e.kind == "head"]
        for lane in (0, 1)
    )
    assert sequential == [(1,), (2,), (2,)]
    assert layered == [(2, 2, 1)]


def test_copies_run_beside_the_computing_of_their_call():
    measured = cards((1e-4,), calls=2)
    slow = measured.model_copy(
        update={"classes": (measured.classes[0].model_copy(
            update={"host_copy": measured.classes[0].units["block"].forward}),)}
    )  # fmt: skip
    from helpers.plans.profiles import block, line

    kinds = (block(kept=line(1.0)),)
    slow = slow.model_copy(update={"model": slow.model.model_copy(update={"kinds": kinds})})
    replay = simulate(slow, plan_by_hand(slow, (4,), modes=(Mode(boundary="host"),)))
    streams = on_stream(replay, 0)
    assert [event.kind for event in streams["copies"]] == ["copy to host"] * 2 + [
        "copy from host"
    ] * 2
    for copy in streams["copies"]:
        assert any(e.start == copy.start and e.call == copy.call for e in streams["compute"])


def test_ranks_that_are_alike_are_replayed_once():
    profile = fleet(64)
    plan = plan_by_hand(profile, [16] * 32 + [8] * 32, micro_batch=1)
    lanes = build_program(profile, plan).lanes
    alike = {(w.device_class, w.samples) for w in plan.workers}
    assert len(lanes) == len(alike) < 64
    assert sorted(rank for lane in lanes for rank in lane.ranks) == list(range(64))


def test_what_all_devices_do_together_is_one_event():
    """So the replay's work grows with what is computed, not with devices x collectives."""
    profile = fleet(64)
    replay = simulate(profile, plan_by_hand(profile, range(16, 80), micro_batch=1))
    lanes, calls = replay.program.lanes, len(profile.model.calls)
    assert len(lanes) == 64
    computed = len(lanes) * (2 * calls + 3)  # both passes of calls and root, and the update
    moved = 3 * calls + 1  # the last call stays between the passes
    assert sum(event.lane is None for event in replay.events) == moved
    assert len(replay.events) == computed + moved


@pytest.mark.extended
def test_the_same_input_gives_the_same_events():
    code = (
        "from helpers.plans.profiles import fleet\n"
        "from helpers.plans.replays import plan_by_hand\n"
        "from gpumix.simulate.events import simulate\n"
        "profile = fleet(8, layers=3)\n"
        "replay = simulate(profile, plan_by_hand(profile, range(8), micro_batch=2))\n"
        "print(replay.events, replay.moved)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
