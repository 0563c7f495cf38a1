"""A device that computes wrong without an error is found while the run trains."""

from __future__ import annotations

import pytest

from helpers.runs.jobs import gpumix, metrics, plan_for, staged_plan_for, toy, train, write_job

STEPS = 24


def harmed(tmp_path, fault: str = "", at: int = 3, steps: int = STEPS, **changes) -> list[dict]:
    """What a job tells whose second rank has a fault from step `at` on."""
    model = toy(width=64, fault=fault, rank=1, at=at)
    job = write_job(tmp_path, model=model, max_steps=steps, **{"replay_steps": 4} | changes)
    train(job, plan=plan_for(job))
    return metrics(tmp_path / "run", "replay")


def test_it_is_named_with_where_it_begins(tmp_path):
    found = harmed(tmp_path, "wrong", at=6, steps=14)
    assert [one["step"] for one in found] == [8, 12]
    assert {tuple(one["devices"]) for one in found} == {("small-0",)}
    # Backward, the blocks come before the embedding, whose gradient is spoilt.
    assert {one["where"] for one in found} == {"(root)"}
    assert all(one["sure"] and 0.002 < one["deviation"] < 1.0 for one in found)


@pytest.mark.extended
def test_sound_devices_are_not_blamed_and_nothing_changes(tmp_path):
    assert not harmed(tmp_path / "replayed")
    assert not harmed(tmp_path / "plain", replay_steps=0)
    assert not metrics(tmp_path / "replayed" / "run", "norm-spike")
    told = [metrics(tmp_path / name / "run") for name in ("replayed", "plain")]
    for mine, other in zip(*told, strict=True):
        assert (mine["loss"], mine["gradient_norm"]) == (other["loss"], other["gradient_norm"])


@pytest.mark.extended
def test_a_gradient_that_jumps_is_told_and_looked_into_at_once(tmp_path):
    """It was for one step only: of the same batch all make the same."""
    assert not harmed(tmp_path, "large-gradient", at=20, replay_steps=STEPS)
    (found,) = metrics(tmp_path / "run", "norm-spike")
    assert (found["device"], found["of_step"], found["step"]) == ("small-0", 20, 21)
    assert found["times"] > 10 > found["others"]


@pytest.mark.extended
def test_jumps_are_told_without_replays_too(tmp_path):
    harmed(tmp_path, "large-gradient", at=20, replay_steps=0)
    assert len(metrics(tmp_path / "run", "norm-spike")) == 1


def test_a_device_that_computes_nothing_has_no_part_in_it(tmp_path):
    job = write_job(
        tmp_path, model=toy(width=64, fault="wrong", rank=1, at=1), max_steps=6, replay_steps=2
    )
    train(job, plan=plan_for(job, samples=(5, 3, 0)))
    found = metrics(tmp_path / "run", "replay")
    assert [one["devices"] for one in found] == [["big-0", "small-0"]] * 2
    assert not any(one["sure"] for one in found)


@pytest.mark.extended
def test_workers_of_a_stage_are_compared(tmp_path):
    model = toy(width=64, blocks=3, fault="wrong", rank=1, at=3)
    job = write_job(tmp_path, model=model, max_steps=7, replay_steps=2)
    train(job, plan=staged_plan_for(job, [(6, 2), (8,)], micro_batch=2))
    found = metrics(tmp_path / "run", "replay")
    assert [one["step"] for one in found] == [4, 6]
    assert all(one["devices"] == ["big-0", "small-0"] and not one["sure"] for one in found)
    assert all(one["where"] == "(root)" and 0.1 < one["deviation"] < 1.0 for one in found)


@pytest.mark.extended
def test_people_are_told(tmp_path):
    """Who computes wrong, or that nobody can be compared with."""
    job = write_job(
        tmp_path, model=toy(width=64, fault="wrong", rank=1, at=1), max_steps=3, replay_steps=1
    )
    for samples, said in {
        (4, 2, 2): "rank 1 (device 'small-0' on localhost) computes wrong: of the same batch its",
        (8, 0, 0): "no batch is replayed: one device alone computes",
    }.items():
        plan_for(job, samples=samples).save(tmp_path / "plan.json")
        output = f"output_dir=run-{samples[0]}"
        done = gpumix("train", job, "--plan", "plan.json", "--set", output, folder=tmp_path)
        assert done.code == 0
        assert said in " ".join(done.err.split())
