"""The trace is what the Trace Event Format wants, and shows every event of every device."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.schema.errors import InputError
from gpumix.schema.plan.step_trace import STREAMS, Trace, make_wait_span, make_work_span
from gpumix.simulate import trace as simulated
from gpumix.simulate.events import simulate
from gpumix.simulate.trace import build_trace
from helpers.draws import examples
from helpers.errors import raises
from helpers.plans.brute import small_profiles
from helpers.plans.replays import any_plans, cards, plan_by_hand, wire

COMMUNICATION = STREAMS.index("communication")
EASY = examples(6)


def document(trace: Trace):
    """What a viewer reads."""
    return json.loads(trace.model_dump_json())


def example():
    measured = cards((1.0, 2.0), network=wire(0.3, 0.4), overhead=0.1)
    plan = plan_by_hand(measured, (2, 3))
    return simulate(measured, plan), plan


@EASY
@given(small_profiles(), st.data())
def test_the_format(profile, data):
    plan = data.draw(any_plans(profile))
    events = document(build_trace(simulate(profile, plan), plan))["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    assert len(set(processes)) == len(processes)
    assert len({tid for _, tid in named}) == len(named)
    for e in events:
        assert e["ph"] in ("X", "M")
        assert isinstance(e["name"], str)
        assert isinstance(e["args"], dict)
        assert e["pid"] in processes
        if e["ph"] == "X":
            assert all(type(e[key]) is int for key in ("ts", "dur", "pid", "tid"))
            assert e["ts"] >= 0
            assert e["dur"] >= 0
            assert (e["pid"], e["tid"]) in named


@EASY
@given(small_profiles(), st.data())
def test_slices_of_a_thread_do_not_overlap(profile, data):
    plan = data.draw(any_plans(profile))
    slices = [e for e in document(build_trace(simulate(profile, plan), plan))["traceEvents"]
              if e["ph"] == "X"]  # fmt: skip
    for thread in {e["tid"] for e in slices}:
        there = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == thread)
        assert all(one[1] <= other[0] for one, other in pairwise(there))


def test_processes_are_devices_in_rank_order():
    replay, plan = example()
    events = document(build_trace(replay, plan))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["localhost: c0-0 (c0)", "localhost: c1-0 (c1)"]
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {"compute", "waiting", "communication"} < set(STREAMS)


def test_times_are_microseconds():
    replay, plan = example()
    slices = [e for e in document(build_trace(replay, plan))["traceEvents"] if e["ph"] == "X"]
    ends = max(e["ts"] + e["dur"] for e in slices)
    assert ends == pytest.approx(replay.step_s * 1e6, abs=1)
    forward = next(e for e in slices if e["name"] == "forward layers.1")
    assert forward["dur"] == 2_000_000
    assert forward["cat"] == "forward"
    assert forward["args"] == {"unit": "layers.1", "micro_batches": [2], "critical": False}


def test_the_critical_path_is_marked():
    replay, plan = example()
    slices = [e for e in document(build_trace(replay, plan))["traceEvents"] if e["ph"] == "X"]
    slow = [e for e in slices if e["pid"] == 2 and e["args"]["critical"]]
    assert sum(e["dur"] for e in slow) == pytest.approx(replay.step_s * 1e6, abs=20)


def test_collectives_are_shown_on_every_device():
    replay, plan = example()
    slices = [e for e in document(build_trace(replay, plan))["traceEvents"] if e["ph"] == "X"]
    one, other = (
        [(e["name"], e["ts"], e["dur"]) for e in slices if e["tid"] == 100 * pid + COMMUNICATION]
        for pid in (1, 2)
    )
    assert one == other
    assert [name for name, *_ in one][-3:] == [
        "reduce layers.1",
        "reduce layers.0",
        "reduce (root)",
    ]


def test_of_very_many_devices_those_that_are_alike_are_shown_once(monkeypatch):
    monkeypatch.setattr(simulated, "MAX_SEPARATE_DEVICES", 2)
    measured = cards((1.0, 2.0, 2.0))
    plan = plan_by_hand(measured, (2, 3, 3))
    events = document(build_trace(simulate(measured, plan), plan))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"1 devices like localhost: c{i}-0 (c{i})" for i in range(3)]


def test_a_trace_is_a_document(tmp_path):
    replay, plan = example()
    path = tmp_path / "step.trace.json"
    build_trace(replay, plan).save(path)
    build_trace(replay, plan).save(path)
    assert Trace.load(path) == build_trace(replay, plan)
    plan.save(tmp_path / "plan.json")
    with raises(InputError, code="document-not-overwritten", what="trace"):
        build_trace(replay, plan).save(tmp_path / "plan.json")


@EASY
@given(small_profiles(), st.data())
def test_at_any_moment_a_device_computes_or_waits(profile, data):
    plan = data.draw(any_plans(profile))
    replay = simulate(profile, plan)
    events = document(build_trace(replay, plan))["traceEvents"]
    threads = {
        e["tid"] for e in events
        if e["name"] == "thread_name" and e["args"]["name"] in ("compute", "waiting")
    }  # fmt: skip
    for pid in {e["pid"] for e in events}:
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["tid"] in threads]
        spans.sort(key=lambda e: (e["ts"], e["dur"]))
        ends = [0, *(e["ts"] + e["dur"] for e in spans)]
        assert [e["ts"] for e in spans] == ends[:-1]
        assert ends[-1] == pytest.approx(1e6 * replay.step_s, abs=1)


def test_spans_lie_by_device_and_stream():
    spans = [
        make_work_span("gather", "layers.1", process="host-a: gpu-0", start_s=0.0015, end_s=0.002),
        make_work_span("forward", "layers.0", process="host-a: gpu-0", start_s=0.001, end_s=0.003),
        make_wait_span("slower rank", process="host-b: gpu-0", start_s=0.001, end_s=0.005),
    ]
    slices = [e for e in document(Trace.of(spans))["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["cat"]) for e in slices] == [
        ("forward layers.0", "forward"), ("gather layers.1", "gather"), ("slower rank", "waiting")
    ]  # fmt: skip
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in slices] == [
        (1, 100, 1000, 2000), (1, 102, 1500, 500), (2, 201, 1000, 4000)
    ]  # fmt: skip
