"""Whoever comes to harm is named, and nobody else, wherever it stands in a plan: its neighbours
begin to wait for it, and for each other, at different times."""

from __future__ import annotations

import re

import pytest

from gpumix.schema.errors import RankLost
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from helpers.runs.jobs import BATCH, staged_plan_for, toy, train, write_job

pytestmark = [pytest.mark.slow, pytest.mark.extended]  # most are waited for until the timeout

DEVICES = ("big-0", "small-0", "small-1")
BLOCKS = 6


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A job without harm, whose profile tells what stages need."""
    model = toy(blocks=BLOCKS) | {"tensor_plan": DIVIDED}
    return write_job(tmp_path_factory.mktemp("sound"), model=model, max_steps=4)


@pytest.fixture(scope="module")
def in_stages(sound) -> list[Plan]:
    """Each in another schedule: of three stages, or of six, of which each rank has two."""
    later = {"schedule": "zero-bubble", "zero_stage": 1, "mode": Mode(recompute=False)}
    return [
        staged_plan_for(sound, [(BATCH,)] * 3, micro_batch=1),
        staged_plan_for(sound, [(BATCH,)] * 3, micro_batch=1, **later),
        staged_plan_for(sound, [(BATCH,)] * 6, micro_batch=1, schedule="interleaved"),
    ]


@pytest.fixture(scope="module")
def a_tp_group_and_one(sound) -> Plan:
    return staged_plan_for(sound, [(BATCH,)] * 2, micro_batch=1, tensor=[2, 1])


DIVIDED = {"blocks.*.into": "colwise", "blocks.*.out": "rowwise"}


def named_after(tmp_path, plan: Plan, fault: str, rank: int, block: int) -> RankLost:
    """What a run says of which one rank comes to harm in the middle of a step."""
    harm = {"fault": fault, "rank": rank, "block": block, "at": BATCH * 2 + 3, "blocks": BLOCKS}
    model = toy(**harm) | {"tensor_plan": DIVIDED}
    job = write_job(tmp_path, model=model, max_steps=4, timeout=6)
    with pytest.raises(RankLost) as caught:
        train(job, plan=plan)
    return caught.value


SAID = {"kill": "was killed by signal 9", "stop": "stopped answering", "hang": "did not take part"}


def check_names(error: RankLost, fault: str, rank: int) -> None:
    assert error.device == DEVICES[rank]
    assert error.device_class == DEVICES[rank].partition("-")[0]
    told = rf"rank {rank} \(device '{DEVICES[rank]}'(, pid \d+| on localhost)\) {SAID[fault]}.*"
    assert re.fullmatch(told, error.what), error


def check_stand(error: RankLost, block: int) -> None:
    """Of a rank that hangs: the calls, and the unit that it computes."""
    assert "stands at toys.py" in error.why
    assert re.search(rf"\((.*, )?(forward|backward) of unit 'blocks\.{block}'\)", error.why)


# Who hangs is found by what the others tell, wherever it stands. Of one that ends or is stopped
# nobody need tell: the two plans together have each of these faults on each rank.
OF_STAGES = [(0, "hang"), (0, "stop"), (1, "kill"), (1, "hang"), (2, "hang"), (2, "stop")]
OF_A_TP_GROUP = [(0, "kill"), (0, "hang"), (1, "hang"), (2, "hang"), (1, "stop"), (2, "kill")]


@pytest.mark.parametrize(("rank", "fault"), OF_STAGES)
def test_of_stages(tmp_path, in_stages, rank, fault):
    plan = in_stages[rank]
    first = plan.stages[plan.stages_of(rank)[0]].units[0]
    block = int(first.removeprefix("blocks."))
    error = named_after(tmp_path, plan, fault, rank, block)
    check_names(error, fault, rank)
    if fault == "hang":
        assert re.search(r"the (message|reduction|all-gather|exchange) .*failed", error.why)
        check_stand(error, block)


@pytest.mark.parametrize(("rank", "fault"), OF_A_TP_GROUP)
def test_of_a_tp_group_of_two_and_the_stage_behind_it(tmp_path, a_tp_group_and_one, rank, fault):
    block = 0 if rank < 2 else BLOCKS - 1
    error = named_after(tmp_path, a_tp_group_and_one, fault, rank, block)
    check_names(error, fault, rank)
    if fault == "hang":
        check_stand(error, block)
