"""A rank that dies is an error on the others, in time."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpumix.engine.comm.collective_progress import ActivityScope, get_main_progress
from gpumix.engine.comm.communicator import CommunicationError
from gpumix.engine.comm.hang_attribution import RankProgress, find_blocking_ranks
from gpumix.engine.schedule import pipeline_parallel
from gpumix.schema.errors import GpumixError
from gpumix.schema.plan.plan import Plan
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import Share, batches, engine_for, own_rows
from helpers.training.staging import own_samples, rows, staged_engine, staged_plan

GPT2 = ARCHITECTURES["gpt2"]
SHARES = [Share(2, 1, 1), Share(2, 1, 2), Share(1, 1, 1)]


def _step_without(dead, how):
    engine = engine_for(GPT2.factory, SHARES)
    mine = own_rows(next(batches(GPT2, 5, 1)), SHARES, engine.comm.rank)
    engine.step(mine)
    if engine.comm.rank == dead:
        if how == "exit":
            os._exit(1)
        time.sleep(60)
    try:
        engine.step(mine)
    except CommunicationError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "how, group_timeout_s",
    [
        pytest.param("exit", 300, id="at once, of one that is gone"),
        pytest.param("sleep", 2, id="at the end of the timeout, of one that hangs"),
    ],
)
def test_the_others_are_told(how, group_timeout_s):
    """Before the harness ends them."""
    results = run_ranks(
        _step_without, 3, 1, how, timeout_s=60, group_timeout_s=group_timeout_s, mortal=[1]
    )
    for rank in (0, 2):
        assert "failed" in results[rank]
        assert "why:" in results[rank]


LAYOUTS = {
    "in the middle of a pipeline": rows([4], [4], [4], micro_batch=1),
    "next to a TP group": rows([4], [4], tensor=[2, 1], micro_batch=1),
    "in a TP group": rows([4], [4], tensor=[1, 2], micro_batch=1),
}


@pytest.mark.parametrize("layout", left_out(LAYOUTS, ["next to a TP group", "in a TP group"]))
def test_the_others_are_told_in_the_middle_of_a_step(tmp_path, layout):
    """Between two micro-batches of rank 1. Who waits for its messages says so; to those that wait
    for another how far each has come tells that it is rank 1."""
    plan = staged_plan("gpt2", LAYOUTS[layout], zero_stage=1).model_dump_json()
    results = run_ranks(
        _step_until, 3, plan, 1, tmp_path, timeout_s=60, group_timeout_s=300, mortal=[1]
    )
    stands = {rank: RankProgress.from_text((tmp_path / str(rank)).read_text()) for rank in range(3)}
    for rank in (0, 2):
        assert "failed" in results[rank]
        assert "why:" in results[rank]
        of_rank_1 = re.search(r"the message with .+ \((from|to) rank 1\) failed", results[rank])
        assert of_rank_1 or find_blocking_ranks(stands, rank) == [1]
        assert of_rank_1 or layout != "in the middle of a pipeline"


def _step_until(plan_json: str, dead: int, folder: Path) -> str | None:
    """The dead rank is gone after its third action in the second step. Each leaves in the folder
    where it stands at the end."""
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    own = own_samples(plan, engine.comm.rank, next(batches(GPT2, plan.global_batch, 1)))

    def leave_stand() -> None:
        stand = get_main_progress(runs_ahead=False).to_text()
        (folder / str(engine.comm.rank)).write_text(stand)

    engine.step(own)
    if engine.comm.rank == dead:
        done, do = itertools.count(), pipeline_parallel.PipelineStep._do

        def until(*args: object) -> None:
            if next(done) == 3:
                leave_stand()
                os._exit(1)
            do(*args)

        pipeline_parallel.PipelineStep._do = until
    try:
        engine.step(own)
    except CommunicationError as error:
        with ActivityScope("after it", error.wait):
            leave_stand()
        return str(error)
    return None


def _steps_after_a_failure():
    """Rank 1 fails in the middle of a step, and everybody goes on regardless."""

    def loss(model, batch):
        result = model(**batch)
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        return result.loss, torch.tensor(1)

    shares = SHARES[:2]
    engine = engine_for(GPT2.factory, shares, loss=loss)
    mine = own_rows(next(batches(GPT2, 4, 1)), shares, engine.comm.rank)
    said = []
    for _ in range(2):
        try:
            engine.step(mine)
        except (ValueError, GpumixError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_after_a_failed_step_there_is_no_other():
    """The ranks' collectives would not meet: gloo ends the process then."""
    of_0, of_1 = run_ranks(_steps_after_a_failure, 2, group_timeout_s=6)
    assert of_0[0].startswith("CommunicationError")
    assert of_1[0] == "ValueError: bad batch"
    for first, second in (of_0, of_1):
        assert second.startswith("TrainingError: an earlier step failed")
        assert first.split(":")[0] in second
