"""Steps of fewer samples than the plan's, as at the end of an epoch, train like one process."""

from __future__ import annotations

import pytest
import torch

from gpumix.schema.errors import InputError
from gpumix.schema.plan.batch_shares import get_micro_batch_rows
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.extended import chosen, left_out
from helpers.training.models import ARCHITECTURES, mean_loss
from helpers.training.reference import batches, engine_alone, initialised, optimizer_for
from helpers.training.staging import rows, run_in_turn, staged_engine, staged_plan

GPT2 = ARCHITECTURES["gpt2"]
SIZES = [6, 5, 2, 6, 1]  # of the global batch, by step

LAYOUTS = {
    "one stage, one stores only": ([rows([4, 2, 0])[0]], {"zero_stage": 3}),
    "one stage, not divided": ([rows([4, 2])[0]], {"zero_stage": 0}),
    "two stages": (rows([6], [2, 4]), {"zero_stage": 1}),
    "two stages, zero-bubble": (
        rows([6], [4, 2], mode=Mode(recompute=False)),
        {"zero_stage": 1, "schedule": "zero-bubble"},
    ),
    "two stages, in waves": (rows([4, 2], [4, 2]), {"zero_stage": 3, "waves": 1}),
    "a TP group": (rows([6], tensor=[2]), {"zero_stage": 1}),
    "a TP group, then two": (rows([6], [4, 2], tensor=[2, 1]), {"zero_stage": 0}),
}
FEW = {"two stages"}


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process."""
    model = initialised(GPT2.factory)
    optimizer = optimizer_for(model.parameters())
    losses = []
    for samples in SIZES:
        loss = mean_loss(model, next(batches(GPT2, samples, 1)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def on_ranks(request) -> dict[str, list[list[float]]]:
    """The losses of each rank."""
    return run_in_turn(
        _losses,
        {
            layout: (staged_plan("gpt2", stages, **settings), ())
            for layout, (stages, settings) in chosen(request, LAYOUTS).items()
        },
    )


@pytest.mark.parametrize("case", left_out(LAYOUTS, LAYOUTS.keys() - FEW))
def test_they_train_like_one_process(case, alone, on_ranks):
    for found in on_ranks[case]:
        assert found == pytest.approx(alone, rel=1e-5)


def _losses(plan_json: str) -> list[float]:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    optimizer = optimizer_for(engine.parameters())
    losses = []
    for samples in SIZES:
        (whole,) = batches(GPT2, samples, 1)
        own = [n for of in get_micro_batch_rows(plan, engine.comm.rank, samples) for n in of]
        part = {key: value[own] for key, value in whole.items()}
        losses.append(engine.step(part, samples=samples).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_sizes_that_no_step_has_are_refused():
    engine = engine_alone(GPT2.factory, 4, 2)
    for samples in (0, 5):
        with raises(InputError, code="global-batch-mismatch", what=(samples, 4)):
            engine.step(next(batches(GPT2, 4, 1)), samples=samples)


def test_parts_of_a_short_batch_are_all_of_it_once():
    plan = staged_plan("gpt2", [rows([3, 0, 5])[0]])
    for samples in range(1, 9):
        found = [
            n for rank in range(3) for of in get_micro_batch_rows(plan, rank, samples) for n in of
        ]
        assert found == list(range(samples))
        assert (
            torch.tensor(
                [len(of) for r in range(3) for of in get_micro_batch_rows(plan, r, samples)]
            ).max()
            <= 2
        )
