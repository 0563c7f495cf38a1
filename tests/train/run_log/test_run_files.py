"""What a run leaves in its folder, and what can be done with it."""

from __future__ import annotations

import json

import pytest

from gpumix.planner.plan import plan as make_plan
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from helpers.runs.jobs import (
    BATCH,
    LENGTH,
    checkpoints,
    gpumix,
    metrics,
    plan_for,
    progress,
    toy,
    train,
    write_job,
)

PEAK_TOLERANCE = 0.97


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on real CPU devices, whose allocator counts every byte, and its summary. The model is
    large beside the samples, which the devices' memory holds too."""
    folder = tmp_path_factory.mktemp("run")
    job = write_job(
        folder,
        model=toy(width=192, blocks=3),
        data={"factory": "toys:tokens", "arguments": {"samples": 200}, "validation_split": 0.1},
        global_batch_size=24,
        optimizer={"lr": 3e-3},
        eval_steps=3,
        eval_batches=1,
        save_steps=2,
        save_total_limit=2,
    )
    return folder / "run", train(job)


def test_metrics_has_one_record_a_step(run):
    folder, summary = run
    records = metrics(folder)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in records] == summary.losses
    assert [r["tokens"] for r in records] == [24 * LENGTH * step for step in range(1, 7)]
    for record in records:
        assert record["tokens_per_s"] == pytest.approx(24 * LENGTH / record["step_s"])
        assert record["gradient_norm"] > 0
        assert record["learning_rate"] > 0
        assert record["time"] > 0


def test_metrics_has_evaluations(run):
    records = metrics(run[0], "evaluation")
    assert [r["step"] for r in records] == [3, 6]
    assert records[1]["loss"] < records[0]["loss"]


def test_metrics_tells_how_each_class_did(run):
    records = metrics(run[0], "classes")
    assert [r["step"] for r in records] == [2, 4, 6]
    [big, small] = records[-1]["classes"]
    assert (big["device_class"], big["devices"]) == ("big", 1)
    assert (small["device_class"], small["devices"]) == ("small", 2)
    assert big["samples"] + small["samples"] == 24
    for of_class in (big, small):
        assert 0 <= of_class["busy_share"] <= 1
        assert of_class["overruns"] == 0


def test_the_peak_is_foretold(run):
    """The allocator counts every byte; what is planned must hold it, or a tight plan runs out."""
    for of_class in metrics(run[0], "classes")[-1]["classes"]:
        assert of_class["planned_peak_bytes"] >= PEAK_TOLERANCE * of_class["peak_bytes"]


def test_progress_is_json_at_any_time(run):
    folder, summary = run
    found = progress(folder)
    assert found["state"] == "finished"
    assert (found["step"], found["steps"]) == (6, 6)
    assert found["loss"] == summary.losses[-1]
    assert found["remaining_s"] == 0
    assert found["tokens_per_s"] > 0
    assert found["step_s"] > 0
    assert found["predicted_step_s"] == summary.predicted_step_s


def test_the_newest_checkpoints_are_kept(run):
    assert checkpoints(run[0]) == ["step-00000004", "step-00000006"]


def test_the_summary_can_be_printed_as_json(run):
    _, summary = run
    assert summary.steps == 6
    assert summary.loss == summary.losses[-1]
    assert summary.predicted_step_s is not None
    assert summary.checkpoint.endswith("step-00000006")
    json.dumps(summary.classes, allow_nan=False)


@pytest.mark.extended
def test_a_run_can_be_trained_again_by_its_plan(run, tmp_path):
    folder, summary = run
    plan = Plan.load(folder / "plan.json")
    again = train(folder.parent / "job.yaml", f"output_dir={tmp_path / 'again'}", plan=plan)
    assert again.losses == summary.losses
    assert Plan.load(tmp_path / "again" / "plan.json") == plan


def test_a_runs_profile_gives_its_plan(run):
    profile = Profile.load(run[0] / "profile.json")
    assert make_plan(profile, 24, space=Space(max_pipeline_stages=1, leave_out=False)) == Plan.load(
        run[0] / "plan.json"
    )


def test_resuming_a_finished_run_does_nothing(tmp_path, capsys):
    job = write_job(tmp_path, max_steps=2)
    plan = plan_for(job)
    first = train(job, plan=plan)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = train(job, plan=plan, resume=True)
    kept = {"run.json", "plan.json", "profile.json", ".lock"}  # what it was going to run by
    assert {p for p, t in files.items() if p.stat().st_mtime_ns != t and p.is_file()} <= {
        tmp_path / "run" / name for name in kept
    }
    assert (again.steps, again.loss, again.losses) == (2, None, [])
    assert progress(tmp_path / "run")["step"] == 2
    assert progress(tmp_path / "run")["state"] == "finished"
    assert [r["loss"] for r in metrics(tmp_path / "run")] == first.losses


@pytest.mark.extended
@pytest.mark.slow
def test_nothing_is_said_of_rates_where_no_step_is_left(tmp_path):
    train(write_job(tmp_path, max_steps=3, lr_scheduler={"type": "cosine"}))
    told = {}
    for steps in (2, 4):
        done = gpumix(
            "train", "job.yaml", "--resume", "--set", f"max_steps={steps}", folder=tmp_path
        )
        assert done.code == 0
        told[steps] = " ".join(done.err.split())
    assert "nothing was left to do" in told[2]
    assert "the rate may jump" not in told[2]
    assert "the rate may jump here" in told[4]


@pytest.mark.extended
def test_a_run_goes_on_to_more_steps(tmp_path):
    job = write_job(tmp_path, lr_scheduler={"type": "constant"})
    whole = train(job, "max_steps=4", f"output_dir={tmp_path / 'whole'}")
    plan = Plan.load(tmp_path / "whole" / "plan.json")
    train(job, "max_steps=2", plan=plan)
    rest = train(job, "max_steps=4", plan=plan, resume=True)
    assert rest.losses == whole.losses[2:]
    assert [r["step"] for r in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert [r["tokens"] for r in metrics(tmp_path / "run")][-1] == 4 * BATCH * LENGTH


@pytest.mark.extended
def test_brackets_in_folders_and_files_are_shown_as_they_are(tmp_path):
    job = write_job(tmp_path, output_dir="run [of old]", max_steps=4, save_steps=2)
    plan = plan_for(job)
    train(job, plan=plan)
    saved = tmp_path / "run [of old]" / "checkpoints"
    manifest = saved / "step-00000004" / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"kind": "checkpoint"', '"kind": "[/x]"'))
    plan.save(tmp_path / "plan.json")
    more = ("--resume", "--set", "max_steps=5")
    done = gpumix("train", "job.yaml", "--plan", "plan.json", *more, folder=tmp_path)
    assert done.code == 0, done.err
    assert f"passed over: {manifest} is damaged: it is a [/x] of schema 1\n" in done.err
    assert f"going on from {saved / 'step-00000002'}\n" in done.err


def test_records_after_the_checkpoint_are_dropped(tmp_path):
    """A run that died told of steps that it did not save; the last line may be half a line."""
    job = write_job(tmp_path, lr_scheduler={"type": "constant"})
    plan = plan_for(job)
    train(job, "max_steps=2", plan=plan)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 3, "loss": 9}\n{"event": "st')
    train(job, "max_steps=4", plan=plan, resume=True)
    assert [r["step"] for r in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_run_without_checkpoints_starts_its_metrics_anew(tmp_path):
    job = write_job(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": 9}\n')
    summary = train(job, "max_steps=2", plan=plan_for(job))
    assert [r["loss"] for r in metrics(tmp_path / "run")] == summary.losses
