"""A run in tensor-parallel groups that loses a rank goes on with the losses of an undisturbed one.

Nobody else has what that rank had, but for the copy in its host's memory.
"""

from __future__ import annotations

import pytest

from helpers.extended import left_out
from helpers.runs.jobs import (
    BATCH,
    CLUSTER,
    PAIR,
    TENSOR_PLAN,
    metrics,
    plan_of_mixed_degrees,
    progress,
    staged_plan_for,
    toy,
    train,
    write_job,
)

KILLED_IN = 3


def tp_group_of_two(job):
    return staged_plan_for(job, [(BATCH,)], micro_batch=BATCH // 2, tensor=[2])


# A plan, the devices that it is for, which rank is lost, and how many micro-batches it has.
CASES = {
    "of a TP group": (tp_group_of_two, PAIR, 1, 2),
    "of a TP group next to one who is alone": (plan_of_mixed_degrees, [CLUSTER[0], *PAIR], 2, 2),
    "who is alone next to a TP group": (plan_of_mixed_degrees, [CLUSTER[0], *PAIR], 0, 3),
}


# Groups of one size and of unlike ones, with whole parameters and with shares of them.
LOST = [
    ("of a TP group next to one who is alone", 3),
    ("of a TP group next to one who is alone", 1),
    ("who is alone next to a TP group", 1),
    ("of a TP group", 3),
]


@pytest.mark.parametrize(
    ("case", "zero_stage"),
    left_out(LOST, LOST[1:]),
)
def test_a_member_is_killed(tmp_path, case, zero_stage):
    plan_of, cluster, rank, passes = CASES[case]

    def job_of(folder, **harm):
        model = toy(**harm) | {"tensor_plan": TENSOR_PLAN}
        copied = {"memory_save_steps": 1}
        return write_job(folder, model=model, cluster=cluster, max_restarts=3, **copied)

    sound = job_of(tmp_path / "sound")
    plan = plan_of(sound).model_copy(update={"zero_stage": zero_stage})
    expected = train(sound, plan=plan).losses
    at, once = passes * KILLED_IN, str(tmp_path / "killed")
    train(job_of(tmp_path, fault="kill", rank=rank, at=at, once=once), plan=plan)
    told = metrics(tmp_path / "run")
    assert [one["step"] for one in told] == list(range(1, len(expected) + 1))
    assert [one["loss"] for one in told] == pytest.approx(expected, rel=1e-5)
    (restart,) = metrics(tmp_path / "run", "restart")
    assert f"rank {rank} (device" in restart["why"] and "was killed by signal 9" in restart["why"]
    assert (restart["kept_in"], restart["resumed_from"]) == ("memory", KILLED_IN - 1)
    assert progress(tmp_path / "run")["state"] == "finished"
