"""Workers of a stage that give each other micro-batches between steps: training is what it was."""

from __future__ import annotations

from typing import Any

import pytest

from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, Mode
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import (
    Trained,
    batches,
    joined,
    optimizer_for,
    pieces_of,
    train_alone,
    worst_error,
)
from helpers.training.staging import own_samples, rows, staged_engine, staged_plan

GPT2 = ARCHITECTURES["gpt2"]
KEPT = Mode(recompute=False)
# Samples of the workers of each stage, in turn; the second stage takes over all that it can.
DEALT = [([8], [4, 4]), ([8], [2, 6]), ([8], [7, 1]), ([8], [4, 4])]
CROSSED = [([4, 4], [4, 4]), ([6, 2], [4, 4]), ([2, 6], [6, 2]), ([4, 4], [2, 6])]


def plan_of(
    samples,
    micro_batch: int = 1,
    tensor: tuple[int, ...] = (),
    mode: Mode = PLAIN,
    **settings: Any,
) -> Plan:
    made = rows(*samples, micro_batch=micro_batch, tensor=tensor, mode=mode)
    return Plan.model_validate(staged_plan("gpt2", made, **settings).model_dump())


def losses_and_weights(plans: list[Plan]) -> tuple[list[float], Trained]:
    results = run_ranks(_train, len(plans[0].workers), [one.model_dump_json() for one in plans])
    losses = [losses for losses, _ in results]
    assert all(seen == losses[0] for seen in losses)
    return losses[0], Trained(losses[0], joined([pieces for _, pieces in results]))


def _train(plans: list[str]) -> tuple[list[float], Any]:
    """A step by each plan."""
    every = [Plan.model_validate_json(text) for text in plans]
    engine = staged_engine("gpt2", every[0])
    optimizer = optimizer_for(engine.parameters())
    losses = []
    for plan, batch in zip(every, batches(GPT2, every[0].global_batch, len(every)), strict=True):
        engine.replan(plan, optimizer)
        optimizer.zero_grad()
        losses.append(engine.step(own_samples(plan, engine.comm.rank, batch)).item())
        optimizer.step()
    return losses, pieces_of(engine)


CASES: list[tuple[Any, dict[str, Any]]] = [
    (DEALT, {"zero_stage": 1, "schedule": "zero-bubble", "mode": KEPT}),
    (DEALT, {"zero_stage": 0}),
    (CROSSED, {"zero_stage": 3, "waves": 2}),
    (CROSSED[:3], {"zero_stage": 1, "micro_batch": 2, "schedule": "gpipe"}),
]


@pytest.mark.parametrize(("dealt", "settings"), left_out(CASES, CASES[1:]))
def test_training_is_that_of_one_process(dealt, settings):
    plans = [plan_of(samples, **settings) for samples in dealt]
    _, found = losses_and_weights(plans)
    assert worst_error(found, train_alone(GPT2, 8, len(plans))) < 1e-5


@pytest.mark.extended
def test_tp_groups_give_each_other_micro_batches_too():
    plans = [plan_of(samples, tensor=(2, 1), zero_stage=1) for samples in DEALT[:2]]
    _, found = losses_and_weights(plans)
    assert worst_error(found, train_alone(GPT2, 8, len(plans))) < 1e-5


def test_what_cannot_be_dealt_anew_is_refused():
    wanted = "a running engine can change only the split of the samples or of the state"
    moves = "a running engine cannot move the state of this plan"
    assert run_ranks(_refused, 3) == [[wanted, wanted, moves]] * 3


def _refused() -> list[str]:
    engine = staged_engine("gpt2", plan_of(([8], [4, 4]), zero_stage=1))
    larger = plan_of(([8], [4, 4]), zero_stage=1, micro_batch=2)
    other_order = plan_of(([8], [4, 4]), zero_stage=1, schedule="gpipe")
    other_state = rows([8], [4, 4], micro_batch=1, state=[[1], [3, 1]])
    found = []
    for plan in (larger, other_order, staged_plan("gpt2", other_state, zero_stage=1)):
        try:
            engine.replan(plan)
        except InputError as error:
            found.append(error.what)
    return found
