"""The trace of a step that was run: the shape of the simulated one, and the time that it took."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from gpumix.engine.comm.step_recorder import Activity, RecordedMove, RecordedStep
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.plan.step_trace import CAUSES, Trace
from gpumix.simulate.events import simulate
from gpumix.simulate.trace import build_trace as simulated_trace
from gpumix.train.controller import JobController
from gpumix.train.monitor.step_trace import build_trace
from helpers.errors import raises
from helpers.extended import left_out
from helpers.runs.jobs import EMULATED, gpumix, metrics, plan_for, toy, train, write_job
from helpers.runs.traces import slices, told

STEP = 3
REAL = [{"class": "one", "accelerator": "cpu", "memory": "64 MiB", "count": 2}]
# By cluster: samples and state shares. Some only store, some only compute.
RUNS = {
    "real": (REAL, (5, 3), (0.5, 0.5)),
    "emulated": (EMULATED, (6, 2, 0), (0.7, 0.0, 0.3)),
}


@pytest.fixture(scope="module", params=left_out(RUNS, ("emulated",)))
def run(request, tmp_path_factory):
    """A run's folder, its plan, and the profile of its devices."""
    cluster, samples, shares = RUNS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    job = write_job(
        folder, model=toy(width=32, blocks=3), cluster=cluster, max_steps=STEP + 1, trace_step=STEP
    )
    plan = plan_for(job, samples, shares).model_copy(update={"emulated": cluster is EMULATED})
    train(job, plan=plan)
    profile = JobController.of_file(job, (), debug=False).profile()
    return folder / "run", plan, profile


@pytest.mark.slow
def test_it_has_the_shape_of_the_simulated_one(run):
    folder, plan, profile = run
    found = slices(Trace.load(folder / "trace.json"))
    expected = slices(simulated_trace(simulate(profile, plan), plan))
    assert list(found) == list(expected)
    for process in expected:
        assert set(found[process]) == set(expected[process])
        for thread in set(expected[process]) - {"waiting"}:
            assert told(found[process][thread]) == told(expected[process][thread])
        for e in found[process]["waiting"] + expected[process]["waiting"]:
            assert (e["name"] in CAUSES, e["cat"]) == (True, "waiting")


def test_the_names_and_numbers_of_lanes_are_the_same(run):
    folder, plan, profile = run
    measured, simulated = (
        {(e["pid"], e["tid"], e["name"], str(e["args"])) for e in json.loads(text)["traceEvents"]
         if e["ph"] == "M"}
        for text in (
            (folder / "trace.json").read_text(),
            simulated_trace(simulate(profile, plan), plan).model_dump_json(),
        )
    )  # fmt: skip
    assert measured == simulated


def test_at_any_moment_of_the_measured_step_a_device_computes_or_waits(run):
    folder, *_ = run
    step_s = metrics(folder)[STEP - 1]["step_s"]
    for threads in slices(Trace.load(folder / "trace.json")).values():
        spans = threads.get("compute", []) + threads["waiting"]
        spans.sort(key=lambda e: (e["ts"], e["dur"]))
        ends = [0, *(e["ts"] + e["dur"] for e in spans)]
        assert [e["ts"] for e in spans] == ends[:-1]
    # A device's step ends when it is done; the run's numbers are those of the first.
    assert ends_of(folder)[0] == round(1e6 * step_s)


def ends_of(folder) -> list[int]:
    """Of each device, in microseconds."""
    found = slices(Trace.load(folder / "trace.json"))
    return [max(e["ts"] + e["dur"] for spans in t.values() for e in spans) for t in found.values()]


def test_collectives_do_not_overlap(run):
    folder, *_ = run
    for threads in slices(Trace.load(folder / "trace.json")).values():
        for one, other in pairwise(threads["communication"]):
            assert one["ts"] + one["dur"] <= other["ts"]


@pytest.mark.parametrize("run", ["real"], indirect=True)
def test_a_run_is_not_traced_unless_it_is_asked_for_and_trains_the_same(run, tmp_path):
    folder, plan, _ = run
    losses = [record["loss"] for record in metrics(folder)]
    found = train(
        folder.parent / "job.yaml", f"output_dir={tmp_path}", "advanced.trace_step=null", plan=plan
    )
    assert found.losses == losses
    assert not (tmp_path / "trace.json").exists()


def test_one_device_waits_for_nobody(tmp_path):
    job = write_job(tmp_path, cluster=[{**REAL[0], "count": 1}], trace_step=2, max_steps=2)
    train(job, plan=plan_for(job, (8,), (1.0,)))
    [threads] = slices(Trace.load(tmp_path / "run" / "trace.json")).values()
    assert set(threads) == {"compute", "waiting"}
    assert {e["name"] for e in threads["waiting"]} == {"overhead"}


def test_a_step_that_never_comes_cannot_be_traced(tmp_path):
    with raises(InputError, code="values-conflict", what=("advanced.trace_step", 9, 6)):
        train(write_job(tmp_path, trace_step=9))


@pytest.mark.extended
def test_a_step_that_is_done_is_told_and_not_traced(tmp_path):
    job = write_job(tmp_path, cluster=REAL, max_steps=2, lr_scheduler={"type": "constant"})
    plan = plan_for(job, (4, 4), (0.5, 0.5))
    plan.save(tmp_path / "plan.json")
    train(job, plan=plan)
    done = gpumix(
        "train", "job.yaml", "--plan", "plan.json", "--resume",
        "--set", "max_steps=3", "--trace-step", "2",
        folder=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "step 2 is done, and is not traced" in done.err
    assert not (tmp_path / "run" / "trace.json").exists()


# -- what the recordings of all ranks say together -------------------------------------------------


def recording(
    issued_s: float, ended_s: float, kind: str = "gather", unit: str = "layers.1"
) -> RecordedStep:
    """Of a rank that waits for its collective as soon as it has issued it."""
    return RecordedStep(
        activities=(
            Activity("overhead", "(root)", 0.0, 0.5),
            Activity("forward", "layers.0", 0.5, issued_s),
            Activity("waiting", unit, issued_s, ended_s, move=0),
            Activity("optimizer", "(root)", ended_s, 9.0),
        ),
        moves=(RecordedMove(kind, unit, issued_s, ended_s),),
    )


def two_ranks() -> Plan:
    workers = tuple(
        Worker(device=f"d{i}", device_class="cpu", samples=3, micro_batch=2, state_share=0.5)
        for i in range(2)
    )
    stage = Stage(units=("layers.0", "layers.1"), workers=workers)
    return Plan(strategy="", model="", sequence_length=1, global_batch=6, stages=(stage,))


def times(spans: list) -> list[tuple[str, float, float]]:
    return [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in spans]


def test_who_waits_for_another_rank_and_who_for_the_collective():
    trace = build_trace(two_ranks(), [recording(1.0, 5.0), recording(3.0, 5.0)])
    fast, slow = slices(trace).values()
    assert times(fast["waiting"]) == [
        ("overhead", 0.0, 0.5), ("slower rank", 1.0, 3.0), ("gather", 3.0, 5.0)
    ]  # fmt: skip
    assert times(slow["waiting"]) == [("overhead", 0.0, 0.5), ("gather", 3.0, 5.0)]
    for threads in (fast, slow):
        assert times(threads["communication"]) == [("gather layers.1", 3.0, 5.0)]
    assert told(fast["compute"]) == [
        ("forward layers.0", "forward", "layers.0", [2, 1]),
        ("optimizer", "optimizer", "(root)", []),
    ]


@pytest.mark.parametrize(
    ("kind", "unit", "cause"),
    [
        ("gather", "(root)", "ends"),
        ("regather", "layers.0", "gather"),
        ("reduce", "layers.1", "reduction"),
        ("reduce", "layers.0", "ends"),
        ("reduce", "(root)", "ends"),
    ],
)
def test_the_cause_of_a_wait_is_that_of_the_simulation(kind, unit, cause):
    ranks = [recording(1.0, 5.0, kind, unit)] * 2
    for threads in slices(build_trace(two_ranks(), ranks)).values():
        assert [name for name, *_ in times(threads["waiting"])] == ["overhead", cause]


def test_collectives_under_way_at_once_are_shown_one_after_the_other():
    moves = (RecordedMove("gather", "a", 1.0, 4.0), RecordedMove("reduce", "b", 2.0, 3.0),
             RecordedMove("gather", "c", 3.5, 6.0))  # fmt: skip
    activities = (Activity("overhead", "(root)", 0.0, 9.0),)
    trace = build_trace(two_ranks(), [RecordedStep(activities, moves)] * 2)
    for threads in slices(trace).values():
        assert times(threads["communication"]) == [
            ("gather a", 1.0, 4.0), ("reduce b", 4.0, 4.0), ("gather c", 4.0, 6.0)
        ]  # fmt: skip


def test_a_clock_that_started_earlier_makes_no_collective_end_after_its_rank():
    """The second issues at 6 by its own clock what ended at 5 by that of the first."""
    trace = build_trace(two_ranks(), [recording(1.0, 5.0), recording(6.0, 7.0)])
    first, second = slices(trace).values()
    assert times(first["waiting"])[1:] == [("slower rank", 1.0, 5.0), ("gather", 5.0, 5.0)]
    assert times(first["communication"]) == [("gather layers.1", 5.0, 5.0)]
    assert times(second["communication"]) == [("gather layers.1", 6.0, 7.0)]


def test_a_recording_arrives_as_it_was():
    one = recording(1.0, 5.0)
    assert RecordedStep.from_json(one.to_json()) == one
