"""Workers of one stage that differ in their tensor parallel degree train like one process."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from gpumix.engine.model.deferred_init import build
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.training.memory import count_tensors
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import SEED, batches, optimizer_for
from helpers.training.staging import (
    on_devices,
    own_samples,
    rows,
    run_in_turn,
    staged_engine,
    staged_plan,
)
from helpers.training.turns import assert_case, in_turn

KEPT = Mode(recompute=False)
ONE_AND_TP_GROUP = rows([4, 3], tensor=[(1, 2)])
TP_GROUP_AND_ONE = rows([4, 2], state=[[1, 3]], tensor=[(2, 1)])
FOUR_IN_TWO_WAYS = rows([2, 3, 2], state=[[3, 1, 2]], tensor=[(1, 4, 2)])
THEN_ONE = rows([4, 2], [6], tensor=[(2, 1), 1])
AFTER_ONE = rows([6], [4, 2], tensor=[1, (1, 2)], micro_batch=1)
SEQUENCE = rows([4, 3], tensor=[(1, 2)], sequence=True)

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "GPT-2, ZeRO 0": ("gpt2", ONE_AND_TP_GROUP, {"zero_stage": 0}),
    "GPT-2, ZeRO 1": ("gpt2", TP_GROUP_AND_ONE, {"zero_stage": 1}),
    "Llama, ZeRO 2": ("llama", ONE_AND_TP_GROUP, {"zero_stage": 2}),
    "Llama, ZeRO 3": ("llama", TP_GROUP_AND_ONE, {"zero_stage": 3}),
    "Qwen3": ("qwen3", ONE_AND_TP_GROUP, {"zero_stage": 3}),
    "BERT": ("bert", TP_GROUP_AND_ONE, {"zero_stage": 3}),
    "T5": ("t5", ONE_AND_TP_GROUP, {"zero_stage": 1}),
    "of one, two and four": ("gpt2", FOUR_IN_TWO_WAYS, {"zero_stage": 3}),
    "then one": ("qwen3", THEN_ONE, {"zero_stage": 3}),
    "then one, whole": ("gpt2", THEN_ONE, {"zero_stage": 1}),
    "after one": ("llama", AFTER_ONE, {"zero_stage": 3, "waves": 2}),
    "positions, Qwen3": ("qwen3", SEQUENCE, {"zero_stage": 3}),
    "positions, GPT-2": ("gpt2", SEQUENCE, {"zero_stage": 1}),
    "positions, T5": ("t5", SEQUENCE, {"zero_stage": 0}),
    "kept": ("qwen3", rows([4, 3], tensor=[(1, 2)], mode=KEPT), {"zero_stage": 2}),
    "sequential": (
        "gpt2",
        rows([4, 3], tensor=[(1, 2)], mode=Mode(order="sequential")),
        {"zero_stage": 1},
    ),
}


trained = in_turn(CASES)
FEW = {"Llama, ZeRO 3"}


@pytest.mark.parametrize("case", left_out(CASES, CASES.keys() - FEW))
def test_training_is_that_of_one_process(case, trained):
    assert_case(case, trained)


WAYS = {
    "in bf16": ({"compute_dtype": "bf16"}, {"communication_dtype": "bf16"}, False),
    "sent in fp32": ({"compute_dtype": "bf16"}, {}, False),
    "state on the host": ({"state_on": "host"}, {}, False),
    "some frozen": ({}, {}, True),
}


HELD = [("in bf16", 1), ("in bf16", 3), ("state on the host", 1), ("sent in fp32", 3)]
HELD += [("some frozen", 3), ("some frozen", 1)]


@pytest.fixture(scope="module")
def held(request):
    """The losses of each rank, and of one that is alone."""
    work = {}
    for way, zero_stage in chosen(request, dict.fromkeys(HELD)):
        of_workers, of_plan, frozen = WAYS[way]
        for layout in (rows([7]), ONE_AND_TP_GROUP):
            plan = staged_plan("llama", layout, zero_stage=zero_stage, **of_plan)
            plan = on_devices(plan, *[of_workers] * len(plan.workers))
            work[way, zero_stage, len(plan.workers)] = plan, (frozen,)
    return run_in_turn(_losses, work)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("case", HELD, ids=str)
def test_other_ways_to_hold_parameters(case, held):
    """As a rank alone with all of them does."""
    ((alone,), ranks) = held[(*case, 1)], held[(*case, 3)]
    assert all(of_rank == ranks[0] for of_rank in ranks)
    assert ranks[0] == pytest.approx(alone, rel=1e-4)


def _losses(plan_json: str, frozen: bool) -> list[float]:
    plan = Plan.model_validate_json(plan_json)
    model = build(ARCHITECTURES["llama"].factory, SEED)
    for name, parameter in model.named_parameters() if frozen else ():
        if "mlp" in name or "q_proj" in name:
            parameter.requires_grad_(False)
    plan = plan.model_copy(update={"model": split_into_units(model).fingerprint()})
    engine = prepare(model, plan)
    optimizer = optimizer_for(engine.parameters())
    losses = []
    for batch in batches(ARCHITECTURES["llama"], plan.global_batch, 3):
        optimizer.zero_grad()
        losses.append(engine.step(own_samples(plan, engine.comm.rank, batch)).item())
        optimizer.step()
    return losses


@pytest.mark.extended
@pytest.mark.parametrize("zero_stage", [3, 1])
def test_nothing_is_left_of_an_engine_that_gathers_in_parts(zero_stage):
    plan = staged_plan("gpt2", ONE_AND_TP_GROUP, zero_stage=zero_stage)
    assert run_ranks(_left, 3, plan.model_dump_json()) == [0, 0, 0]


def _left(plan_json: str) -> int:
    """How many tensors there are more after a second engine is gone, before the collector runs."""
    plan = Plan.model_validate_json(plan_json)
    gc.collect()
    gc.disable()
    left = []
    for _ in range(2):
        engine = staged_engine("gpt2", plan)
        for batch in batches(ARCHITECTURES["gpt2"], plan.global_batch, 2):
            engine.step(own_samples(plan, engine.comm.rank, batch))
        del engine, batch
        time.sleep(0.5)  # threads of gloo let go of what they have sent
        left.append(count_tensors())
    return max(0, left[1] - left[0])
