"""A run that was trained: its folder, and numbers of its page, which are those of its files."""

from __future__ import annotations

import json
import re
from statistics import mean

import pytest

from gpumix.report.facts import RunFacts
from gpumix.report.page import render_page
from gpumix.report.run import read_run
from gpumix.report.speed import compute_run_speeds
from gpumix.report.step_rows import make_traced_rows, simulate_rows
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.reading.read import read_job
from gpumix.schema.units import show_bytes, show_seconds
from gpumix.train.run_figures import words
from helpers.errors import raises
from helpers.runs.folders import PARTS, check_alone, read
from helpers.runs.jobs import EMULATED, FEW_PLANS, train, write_job


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder, and its summary: uneven devices, evaluations, checkpoints, a traced step."""
    folder = tmp_path_factory.mktemp("trained")
    job = write_job(
        folder,
        cluster=EMULATED,
        max_steps=8,
        trace_step=5,
        eval_steps=4,
        eval_batches=1,
        save_steps=4,
        techniques=FEW_PLANS,
        profile_cache="profiles",
        profile_budget=2,
    )
    return folder / "run", train(job)


@pytest.fixture(scope="module")
def shown(trained):
    """The text of a run's page, with titles of pictures."""
    return read(read_run(trained[0])).text


def lines_of(folder, event):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [told for line in lines if (told := json.loads(line))["event"] == event]


def test_a_trained_run_has_all_of_it(trained):
    folder, summary = trained
    found = read_run(folder)
    assert found.plan == Plan.load(folder / "plan.json")
    assert [one.loss for one in found.history.steps] == summary.losses
    assert found.progress.state == "finished"
    assert [step for step, _ in found.checkpoints] == [8, 4]
    assert found.trace is not None and found.record is not None


def test_the_page_of_a_run_is_whole_and_alone(trained):
    found = read(read_run(trained[0]))
    check_alone(found)
    assert [a["id"] for a in found.named("section")] == PARTS


def test_the_speed_is_that_of_the_run(trained, shown):
    _, summary = trained
    assert words.format_token_rate(summary.tokens_per_s) in shown
    assert f"measured, {show_seconds(summary.step_s)} a step" in shown
    assert words.describe_gap(summary.slower_than_planned) in shown
    assert f"loss {summary.loss:.4f}" in shown


def test_the_prediction_is_that_of_the_plan(trained, shown):
    expected = Plan.load(trained[0] / "plan.json").prediction
    assert expected is not None
    assert show_seconds(expected.step_s) in shown
    assert words.format_token_rate(expected.tokens_per_s) in shown


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
        assert f"measured {show_bytes(of_class['peak_bytes'])}, predicted {told}" in shown
        for cause, taken in fullest.memory_bytes.items():
            if taken:
                assert f"predicted: {words.name_memory(cause)}" in shown
                assert show_bytes(taken) in shown


def test_measurements_are_compared_with_predictions_in_words(trained):
    """Computed again, from the plan, the run's summary and the records of its devices."""
    folder, summary = trained
    plan = json.loads((folder / "plan.json").read_text())
    predicted = plan["prediction"]
    gap = words.describe_gap(summary.step_s / predicted["step_s"] - 1)
    expected = {"step time": gap}
    of_device = {one["device"]: one for one in predicted["workers"]}
    workers = [worker for stage in plan["stages"] for worker in stage["workers"]]
    told = [one for line in lines_of(folder, "classes") for one in line["classes"]]
    assert {line["step"] for line in lines_of(folder, "classes")} == {2, 4, 6, 8}
    for name in {one["device_class"] for one in told}:
        own = [of_device[w["device"]] for w in workers if w["device_class"] == name]
        peak = max(one["peak_bytes"] for one in told if one["device_class"] == name)
        planned_peak = max(sum(w["memory_bytes"].values()) for w in own)
        expected[f"{name}: memory"] = words.describe_excess(planned_peak, peak)
        # The first window has the first two steps alone, which do not count.
        later = [line for line in lines_of(folder, "classes") if line["step"] > 2]
        busy = mean(
            one["busy_share"]
            for line in later
            for one in line["classes"]
            if one["device_class"] == name
        )
        planned_busy = mean(w["busy_s"] for w in own) / predicted["step_s"]
        expected[f"{name}: busy"] = words.describe_excess(planned_busy, busy)
    shown = last_cells(render_page(read_run(folder)))
    assert len(expected) == 5
    assert {name: shown[name] for name in expected} == expected


def last_cells(text: str) -> dict[str, str]:
    """The last cell of each row of "Measured against predicted"."""
    table = text.partition("The run, and each GPU type")[2].partition("</table>")[0]
    rows = [re.findall(r">([^<>]+)<", row) for row in table.split("<tr")]
    return {cells[0]: cells[-1] for cells in rows if cells}


def test_validation_losses_are_those_of_the_metrics(trained, shown):
    told = lines_of(trained[0], "evaluation")
    assert [one["step"] for one in told] == [4, 8]
    for one in told:
        assert f"validation loss {one['loss']:.4f} at step {one['step']}" in shown


def test_who_computes_and_stores_adds_up(trained):
    facts = RunFacts(read_run(trained[0]))
    assert sum(group.samples for group in facts.groups) == facts.run.plan.global_batch
    assert sum(group.computed for group in facts.groups) == pytest.approx(1)
    stored = [group.stored for group in facts.groups]
    if facts.run.plan.zero_stage:
        assert sum(stored) == pytest.approx(1)
    else:
        assert set(stored) == {None}


def test_the_job_can_be_started_again_from_the_page(trained, shown, tmp_path):
    """The job in it is the one that ran."""
    found = read_run(trained[0]).record
    assert found is not None
    assert found.job_text() in shown
    (tmp_path / "job.yaml").write_text(found.job_text())
    again = read_job(tmp_path / "job.yaml")
    assert again.model_dump(mode="json") == found.job
    assert Plan.load(trained[0] / "plan.json").digest() in shown


def test_a_page_of_emulated_numbers_is_labelled_once(trained):
    found = read(read_run(trained[0]))
    assert found.text.count("emulated devices") == 1
    assert found.text.index("emulated devices") < found.text.index("What to do next")


def test_commands_name_the_code_that_a_job_calls(trained, shown):
    assert "gpumix train job.yaml --allow toys --plan" in shown
    assert "--resume" not in shown  # all steps are done


def test_of_a_run_the_measured_speed_is_the_one_that_it_told(trained):
    folder, summary = trained
    found = compute_run_speeds(read_run(folder))
    assert found.best is found.measured
    assert found.measured.source == "measured"
    assert found.measured.step_s == summary.step_s
    assert found.measured.tokens_per_s == pytest.approx(summary.tokens_per_s)


def test_the_traced_step_has_the_same_devices(trained):
    run = read_run(trained[0])
    assert run.trace is not None and run.profile is not None
    found, planned_step = (
        make_traced_rows(run.trace, run.plan),
        simulate_rows(run.profile, run.plan),
    )
    assert planned_step is not None
    assert [row.device for row in found.rows] == [row.device for row in planned_step.rows]
    for row, worker in zip(found.rows, run.plan.workers):
        computes = {"forward", "backward"} <= {bar.kind for bar in row.computes}
        assert computes == (worker.samples > 0)
        assert all(0 <= bar.start_s <= bar.end_s <= found.step_s for bar in row.computes)


@pytest.mark.parametrize("name", ["plan.json", "profile.json", "run.json", "trace.json"])
def test_a_file_of_a_newer_schema_is_refused(tmp_path, trained, name):
    for file in trained[0].glob("*.json*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    told = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps(told | {"schema_version": 99}))
    with raises(InputError, code="schema-unsupported", what=99) as caught:
        read_run(tmp_path)
    assert caught.value.exit_code == 2 and caught.value.fix
    assert name in caught.value.where
