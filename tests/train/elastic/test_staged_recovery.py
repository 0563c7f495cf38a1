"""A run in stages that loses a rank goes on by itself, with the losses of one that lost none."""

from __future__ import annotations

import pytest

from helpers.extended import left_out
from helpers.runs.jobs import BATCH, metrics, progress, staged_plan_for, toy, train, write_job

STEPS = 8
# Each device a stage; each stage's second micro-batch is under way in another one.
ROWS = [(BATCH,)] * 3
# A stage's own block passes twice for each of four micro-batches: in the third and fourth step,
# after the passes of the rehearsal.
IN_STEPS = {"forward": 27, "backward": 40}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = write_job(folder, max_steps=STEPS, model=toy(blocks=3))
    train(job, plan=staged_plan_for(job, ROWS, zero_stage=1))
    return metrics(folder / "run")


LOST = [
    (0, 1, "backward"),
    (1, 3, "backward"),
    (1, 0, "forward"),
    (1, 1, "forward"),
    (2, 3, "forward"),
]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "zero_stage", "place"),
    left_out(LOST, LOST[1:4]),
)
def test_a_rank_of_a_stage_is_killed(tmp_path, undisturbed, rank, zero_stage, place):
    sound = write_job(tmp_path / "sound", max_steps=STEPS, model=toy(blocks=3))
    once = str(tmp_path / "killed")
    harm = {"fault": "kill", "rank": rank, "block": rank, "at": IN_STEPS[place], "once": once}
    settings = {"max_restarts": 3, "memory_save_steps": 1}
    job = write_job(tmp_path, max_steps=STEPS, model=toy(blocks=3, **harm), **settings)
    train(job, plan=staged_plan_for(sound, ROWS, zero_stage=zero_stage))
    told = metrics(tmp_path / "run")
    assert [one["step"] for one in told] == list(range(1, STEPS + 1))
    for mine, other in zip(told, undisturbed, strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
    (restart,) = metrics(tmp_path / "run", "restart")
    assert f"rank {rank} (device" in restart["why"] and "was killed by signal 9" in restart["why"]
    assert restart["kept_in"] == "memory"
    assert restart["resumed_from"] in (1, 2, 3)
    assert progress(tmp_path / "run")["state"] == "finished"
