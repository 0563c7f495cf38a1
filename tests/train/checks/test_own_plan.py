"""A resumed run whose measurements are gone goes on by its own plan, as long as that holds."""

from __future__ import annotations

from pathlib import Path

from gpumix.schema.plan.plan import Plan
from gpumix.train.checks.own_plan import load_own_plan
from gpumix.train.controller import JobController
from helpers.runs.jobs import checkpoints, train, write_job


def own_plan(job: Path, *overrides: str) -> Plan | None:
    pipeline = JobController.of_file(job, overrides, debug=False)
    found = load_own_plan(pipeline.job, pipeline.folder, pipeline.cluster)
    return found and found[0]


def test_a_resumed_run_measures_nothing_without_a_cache(tmp_path, capsys):
    kept = f"advanced.profile_cache={tmp_path / 'kept'}"
    few = {"max_pipeline_stages": 1, "leave_out": False, "zero_stages": [3]}
    job = write_job(tmp_path, max_steps=2, save_steps=2, techniques=few)
    train(job, kept)
    (tmp_path / "kept").rename(tmp_path / "gone")
    made = Plan.load(tmp_path / "run" / "plan.json")
    capsys.readouterr()
    train(job, kept, "max_steps=3", resume=True)
    assert "the run's own plan and profile still hold" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()
    assert Plan.load(tmp_path / "run" / "plan.json").stages == made.stages
    assert checkpoints(tmp_path / "run")

    assert own_plan(job, kept) is not None
    for change in ("strategy=even", "global_batch_size=20", "model.arguments={width: 16}"):
        assert own_plan(job, kept, change) is None
    (tmp_path / "run" / "profile.json").unlink()
    assert own_plan(job, kept) is None
