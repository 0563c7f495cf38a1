"""Numbers of the page are those of the run's files."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gpumix.report.facts import RunFacts
from gpumix.report.live import render_frame
from helpers.runs.folders import event_line, planned, read, run_of, step_line


def shown(facts: RunFacts) -> str:
    """The page, and what a terminal shows."""
    terminal = Console(width=120, file=io.StringIO())
    terminal.print(render_frame(facts, width=120))
    return read(facts.run).text + terminal.file.getvalue()


def test_real_devices_have_no_such_label(tmp_path):
    assert "emulated" not in read(run_of(tmp_path)).text


def test_estimates_are_labelled(tmp_path):
    plan = planned().model_copy(update={"estimated": ("quick", "tardy")})
    found = read(run_of(tmp_path, plan=plan))
    assert found.text.count("estimated: quick, tardy") == 1
    assert "datasheets" in found.text


def test_what_happened_is_told_with_step_and_reason(tmp_path):
    lines = [
        step_line(1),
        event_line(
            "restart", 7, resumed_from=6, why="rank 1 died", decided="starting again", seconds=4.0
        ),
        event_line(
            "plan",
            8,
            live=True,
            samples={"a": 3, "b": 5},
            samples_before={"a": 4, "b": 4},
            shares={"a": 0.5, "b": 0.5},
            shares_before={"a": 0.5, "b": 0.5},
            why="b is fast",
        ),
        event_line("input-bound", 9, ranks=[{"device": "a", "share": 0.25, "limit": "cores"}]),
        event_line("replay", 10, devices=["a"], sure=True, where="h.3", deviation=0.5),
        event_line("checkpoint", 11, path="/x/step-00000011", seconds=2.0, stalled_s=0.5),
        event_line("copies", 4, every_steps=3),
        event_line("later than this version", 12, what="ever"),
    ]  # fmt: skip
    facts = RunFacts(run_of(tmp_path, lines, state="failed", step=12, why="the disk is full"))
    told = {one.event: (one.step, f"{one.what}; {one.why}") for one in facts.events}
    assert told["restart"] == (
        7, "Restarted from step 6, training after 4.00 s; rank 1 died; starting again",
    )  # fmt: skip
    assert told["plan"] == (8, "Rebalanced; b is fast; samples: a 4 to 3, b 4 to 5")
    assert told["copies"] == (4, "Training state is copied into host memory; every 3 steps")
    assert told["input-bound"] == (9, "GPUs wait for data; a 25% of each step (cores)")
    assert told["replay"][1].startswith(
        "a computes wrong results; its gradient of the same sample is off by 50%"
    )
    assert told["checkpoint"][1].startswith("Checkpoint step-00000011; written in 2.00 s")
    assert told["later than this version"] == (12, "later than this version; what ever")
    assert told["failed"] == (12, "The run failed; the disk is full")
    text = read(facts.run).text
    for _, said in told.values():
        assert said.split("; ", 1)[0] in text and said.split("; ", 1)[1] in text


def test_a_run_that_its_script_ends_early_is_told_as_that(tmp_path):
    """On the page and in a terminal."""
    facts = RunFacts(run_of(tmp_path, state="finished", step=9, steps=20))
    (end,) = facts.events
    assert (end.step, end.what, end.why) == (9, "Ended by the script", "after step 9 of 20")
    text = shown(facts)
    assert "ended by the script" in text and "All steps are done" not in text


@pytest.mark.parametrize("steps", [9, None])
def test_a_run_that_has_no_more_steps_to_do_is_finished(tmp_path, steps):
    facts = RunFacts(run_of(tmp_path, state="finished", step=9, steps=steps))
    (end,) = facts.events
    assert end.what == "All steps are done"
    assert "finished" in shown(facts)


def test_what_is_told_after_the_end_of_a_run_stands_behind_it(tmp_path):
    """On the page and in a terminal; an event without a time stays where it was told."""
    lines = [
        event_line("checkpoint", 3, time=1.7e9, path="/x/first"),
        event_line("checkpoint", 3, time=None, path="/x/second"),
        event_line("compared", 3, time=1.7e9 + 20, strategy="even", step_s=2.0, steps=3),
    ]
    facts = RunFacts(run_of(tmp_path, lines, state="finished", step=3, steps=3, time=1.7e9 + 10))
    order = [
        "Checkpoint first",
        "Checkpoint second",
        "All steps are done",
        "Strategy even measured",
    ]
    assert [one.what for one in facts.events] == order
    terminal = Console(width=120, file=io.StringIO())
    terminal.print(render_frame(facts, width=120))
    for text in (read(facts.run).text, terminal.file.getvalue()):
        places = [text.rindex(what) for what in order]
        assert places == sorted(places)


def test_parts_are_those_since_the_last_split(tmp_path):
    plan = planned()
    before = {worker.device: worker.samples for worker in plan.workers}
    first, *others = before
    now = {first: plan.global_batch - len(others)} | dict.fromkeys(others, 1)
    shares = {worker.device: worker.state_share for worker in plan.workers}
    told = {"samples": now, "samples_before": before, "shares": shares, "shares_before": shares}
    facts = RunFacts(run_of(tmp_path, [event_line("plan", 3, live=True, why="", **told)]))
    assert {m.device: m.samples.most for m in facts.cluster.all_members} == now
    assert sum(group.samples for group in facts.groups) == plan.global_batch
    assert "Rebalanced after step 3" in read(facts.run).text
    again = [event_line("plan", step, live=live, **told) for step, live in ((3, True), (5, False))]
    facts = RunFacts(run_of(tmp_path / "again", again))  # since then it goes by its plan
    assert {m.device: m.samples.most for m in facts.cluster.all_members} == before


def test_peaks_are_compared_with_the_splits_that_they_are_of(tmp_path):
    """Another split was fuller than that of the plan on disk."""
    device_class = planned().workers[0].device_class
    told = {"device_class": device_class, "peak_bytes": 7, "planned_memory": {"state": 6, "all": 3}}
    facts = RunFacts(run_of(tmp_path, [event_line("classes", 3, classes=[told])]))
    seen, *others = facts.classes
    assert (seen.planned_peak_bytes, seen.peak_bytes) == (9, 7)
    assert all(one.planned_peak_bytes and one.peak_bytes is None for one in others)
