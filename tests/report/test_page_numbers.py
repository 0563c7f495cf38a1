"""Numbers of the page are those of the run's files."""

from __future__ import annotations

import io
import json
import re
from statistics import mean

import pytest
from folders import event_line, planned, read, run_of, step_line
from rich.console import Console

from gpumix.report import words
from gpumix.report.facts import Facts
from gpumix.report.live import frame
from gpumix.report.page import page
from gpumix.report.run import read_run
from gpumix.spec.plan import Plan
from gpumix.spec.units import show_bytes, show_seconds


@pytest.fixture(scope="module")
def shown(trained):
    """The text of a run's page, with titles of pictures."""
    return read(read_run(trained[0])).text


def lines_of(folder, event):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [told for line in lines if (told := json.loads(line))["event"] == event]


def test_the_speed_is_that_of_the_run(trained, shown):
    _, summary = trained
    assert words.rate(summary.tokens_per_s) in shown
    assert f"measured, {show_seconds(summary.step_s)} a step" in shown
    assert f"predicted step time off by {summary.prediction_error:+.1%}" in shown
    assert f"loss {summary.loss:.4f}" in shown


def test_the_prediction_is_that_of_the_plan(trained, shown):
    expected = Plan.load(trained[0] / "plan.json").prediction
    assert expected is not None
    assert show_seconds(expected.step_s) in shown
    assert words.rate(expected.tokens_per_s) in shown


def test_memory_is_that_of_plan_and_metrics(trained, shown):
    plan = Plan.load(trained[0] / "plan.json")
    assert plan.prediction is not None
    for of_class in lines_of(trained[0], "classes")[-1]["classes"]:
        name = of_class["device_class"]
        own = {w.device for w in plan.workers if w.device_class == name}
        fullest = max(
            (w for w in plan.prediction.workers if w.device in own), key=lambda w: w.peak_bytes
        )
        told = f"{show_bytes(fullest.peak_bytes)} of {show_bytes(fullest.memory_limit_bytes)}"
        assert f"{told}; measured {show_bytes(of_class['peak_bytes'])}" in shown
        for cause, taken in fullest.memory_bytes.items():
            assert not taken or f"{cause}: {show_bytes(taken)}" in shown


def test_predictions_are_off_by_what_was_measured(trained):
    """Computed anew, from the plan, the run's summary and what its devices told."""
    folder, summary = trained
    plan = json.loads((folder / "plan.json").read_text())
    predicted = plan["prediction"]
    expected = {
        "step time": predicted["step_s"] / summary.step_s,
        "tokens/s": predicted["tokens_per_s"] / summary.tokens_per_s,
    }
    of_device = {one["device"]: one for one in predicted["workers"]}
    workers = [worker for stage in plan["stages"] for worker in stage["workers"]]
    told = [one for line in lines_of(folder, "classes") for one in line["classes"]]
    assert {line["step"] for line in lines_of(folder, "classes")} == {2, 4, 6, 8}
    for name in {one["device_class"] for one in told}:
        own = [of_device[w["device"]] for w in workers if w["device_class"] == name]
        peak = max(one["peak_bytes"] for one in told if one["device_class"] == name)
        expected[f"{name}: memory"] = max(sum(w["memory_bytes"].values()) for w in own) / peak
        busy = mean(one["busy_share"] for one in told if one["device_class"] == name)
        planned_busy = mean(w["busy_s"] for w in own) / predicted["step_s"]
        expected[f"{name}: busy"] = planned_busy / busy
    shown = off_by(page(read_run(folder)))
    assert len(expected) == 6
    assert {name: shown[name] for name in expected} == {
        name: f"{ratio - 1:+.1%}" for name, ratio in expected.items()
    }


def off_by(text: str) -> dict[str, str]:
    """The last cell of each row of "Predicted against measured"."""
    table = text.partition("by how much the prediction is off")[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)<", row) for row in table.split("<tr")]
    return {cells[0]: cells[-1] for cells in rows[1:] if cells}


def test_held_out_losses_are_those_of_the_metrics(trained, shown):
    told = lines_of(trained[0], "evaluation")
    assert [one["step"] for one in told] == [4, 8]
    for one in told:
        assert f"held-out loss {one['loss']:.4f} at step {one['step']}" in shown


def test_who_computes_and_stores_adds_up(trained):
    facts = Facts(read_run(trained[0]))
    assert sum(group.samples for group in facts.groups) == facts.run.plan.global_batch
    assert sum(group.computed for group in facts.groups) == pytest.approx(1)
    stored = [group.stored for group in facts.groups]
    if facts.run.plan.zero_stage:
        assert sum(stored) == pytest.approx(1)
    else:
        assert set(stored) == {None}


def test_the_job_can_be_started_again_from_the_page(trained, shown, tmp_path):
    """The job in it is the one that ran."""
    from gpumix.spec.read import read_job

    found = read_run(trained[0]).record
    assert found is not None
    assert found.job_text() in shown
    (tmp_path / "job.yaml").write_text(found.job_text())
    again = read_job(tmp_path / "job.yaml")
    assert again.model_dump(mode="json") == found.job
    assert Plan.load(trained[0] / "plan.json").digest() in shown


def test_emulated_numbers_are_labelled_in_every_part(trained):
    found = read(read_run(trained[0]))
    assert found.text.count("emulated devices") >= len(found.named("section"))


def test_real_devices_have_no_such_label(tmp_path):
    assert "emulated" not in read(run_of(tmp_path)).text


def test_estimates_are_labelled(tmp_path):
    plan = planned().model_copy(update={"estimated": ("quick", "tardy")})
    found = read(run_of(tmp_path, plan=plan))
    assert found.text.count("estimated: quick, tardy") >= len(found.named("section"))
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
    facts = Facts(run_of(tmp_path, lines, state="failed", step=12, why="the disk is full"))
    told = {one.event: (one.step, f"{one.what}; {one.why}") for one in facts.events}
    assert told["restart"] == (
        7, "Started again from step 6, training again after 4.00 s; rank 1 died; starting again",
    )  # fmt: skip
    assert told["plan"] == (8, "Split anew; b is fast; samples: a 4 to 3, b 4 to 5")
    assert told["copies"] == (4, "The state is copied into the hosts' memory; every 3 steps")
    assert told["input-bound"] == (9, "Devices wait for their data; a 25% of each step (cores)")
    assert told["replay"][1].startswith("a computes wrong; its gradient of the same sample is 50%")
    assert told["checkpoint"][1].startswith("Checkpoint step-00000011; written in 2.00 s")
    assert told["later than this version"] == (12, "later than this version; what ever")
    assert told["failed"] == (12, "The run failed; the disk is full")
    text = read(facts.run).text
    for _, said in told.values():
        assert said.split("; ", 1)[0] in text and said.split("; ", 1)[1] in text


def test_what_is_told_after_the_end_of_a_run_stands_behind_it(tmp_path):
    """On the page and in a terminal; an event without a time stays where it was told."""
    lines = [
        event_line("checkpoint", 3, time=1.7e9, path="/x/first"),
        event_line("checkpoint", 3, time=None, path="/x/second"),
        event_line("compared", 3, time=1.7e9 + 20, strategy="even", step_s=2.0, steps=3),
    ]
    facts = Facts(run_of(tmp_path, lines, state="finished", step=3, time=1.7e9 + 10))
    order = [
        "Checkpoint first",
        "Checkpoint second",
        "All steps are done",
        "Strategy even measured",
    ]
    assert [one.what for one in facts.events] == order
    terminal = Console(width=120, file=io.StringIO())
    terminal.print(frame(facts, width=120))
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
    facts = Facts(run_of(tmp_path, [event_line("plan", 3, live=True, why="", **told)]))
    assert {m.device: m.samples.most for m in facts.cluster.all_members} == now
    assert sum(group.samples for group in facts.groups) == plan.global_batch
    assert "Split anew after step 3" in read(facts.run).text
    again = [event_line("plan", step, live=live, **told) for step, live in ((3, True), (5, False))]
    facts = Facts(run_of(tmp_path / "again", again))  # since then it goes by its plan
    assert {m.device: m.samples.most for m in facts.cluster.all_members} == before


def test_commands_name_the_code_that_a_job_calls(trained, shown):
    assert "gpumix train job.yaml --allow toys --plan" in shown
    assert "--resume" not in shown  # all steps are done
