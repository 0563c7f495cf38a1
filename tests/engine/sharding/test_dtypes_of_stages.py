"""Stages that compute in different dtypes, with weights that all gather in one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from gpumix.engine.sharding.mixed_precision import TORCH_DTYPE
from gpumix.schema.plan.dtypes import choose_communication_dtype
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import ComputeDtype, Mode
from helpers.extended import chosen, left_out
from helpers.training.models import mean_loss
from helpers.training.reference import (
    batches,
    computed_in,
    initialised,
    joined,
    pieces_of,
    tensor_errors,
)
from helpers.training.staging import (
    EVERY,
    Row,
    calls_of,
    on_devices,
    own_samples,
    rows,
    run_in_turn,
    staged_engine,
    staged_plan,
)

STEPS = 3
LEARNING_RATE = 0.3
KEPT = Mode(recompute=False)
ALONE = rows([6], [6])

CASES: dict[str, tuple[str, list[Row], dict[str, Any]]] = {
    "1f1b, 1": ("gpt2", ALONE, {"zero_stage": 1}),
    "waves, 3": ("gpt2", ALONE, {"zero_stage": 3, "waves": 2}),
    "zero-bubble, 0": (
        "gpt2",
        rows([6], [6], mode=KEPT),
        {"zero_stage": 0, "schedule": "zero-bubble"},
    ),
    "interleaved, 1": ("gpt2-deep", 2 * ALONE, {"zero_stage": 1, "schedule": "interleaved"}),
}
ORDERS: dict[str, tuple[tuple[ComputeDtype, ComputeDtype], ...]] = {
    "1f1b, 1": (("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")),
    "waves, 3": (("bf16", "fp32"), ("fp16", "bf16")),
    "zero-bubble, 0": (("fp32", "bf16"), ("fp16", "bf16")),
    "interleaved, 1": (("fp32", "bf16"),),
}
OVERFLOWS: tuple[tuple[ComputeDtype, ComputeDtype], ...] = (("fp32", "fp16"), ("fp16", "fp32"))


def planned(case: str, dtypes: tuple[ComputeDtype, ...]) -> Plan:
    name, layout, settings = CASES[case]
    sent = choose_communication_dtype(dtypes)
    plan = staged_plan(name, layout, communication_dtype=sent, **settings)
    return on_devices(plan, *({"compute_dtype": dtype} for dtype in dtypes))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def _train(plan_json: str, name: str) -> tuple[list[float], Any, set[torch.dtype]]:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine(name, plan)
    optimizer = sgd(engine.parameters())
    (batch,) = batches(EVERY[name], plan.global_batch, 1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(engine.step(own_samples(plan, engine.comm.rank, batch)).item())
        assert not engine.overflowed
        optimizer.step()
    return losses, pieces_of(engine), computed_in(engine)


def trained_alone(name: str, plan: Plan) -> tuple[list[float], dict[str, np.ndarray]]:
    """One process: at each step the weights are rounded to what all gather in, and each block, and
    what comes before and after all of them, computes with them in the dtype of its stage."""
    dtype_of = {
        unit: TORCH_DTYPE[stage.workers[0].compute_dtype]
        for stage in plan.stages
        for unit in stage.units
    }
    master, model = (initialised(EVERY[name].factory) for _ in range(2))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    calls = calls_of(name)
    model.to(dtype_of[calls[0]])
    for last in (model.transformer.ln_f, model.lm_head):
        last.to(dtype_of[calls[-1]])
    for unit in calls:
        block = model.get_submodule(unit).to(dtype_of[unit])
        block.register_forward_pre_hook(_cast_to(dtype_of[unit]), with_kwargs=True)
    sent = TORCH_DTYPE[plan.communication_dtype]
    optimizer = sgd(master.parameters())
    (batch,) = batches(EVERY[name], plan.global_batch, 1)
    losses = []
    scale = 2.0**8  # so that gradients in fp16 are not lost
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.zero_grad()
        weights = dict(master.named_parameters(remove_duplicate=False))
        for key, copy in model.named_parameters():
            copy.data.copy_(weights[key].data.to(sent))
        loss = mean_loss(model, batch)
        (loss.float() * scale).backward()
        for key, copy in model.named_parameters():
            held = 0 if weights[key].grad is None else weights[key].grad
            weights[key].grad = held + copy.grad.float() / scale
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: weight.detach().numpy() for key, weight in master.named_parameters()}


def _cast_to(dtype: torch.dtype) -> Any:
    def cast(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        def one(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        return tree_map(one, args), tree_map(one, kwargs)

    return cast


EACH = {f"{case}, {'-'.join(each)}": (case, each) for case in CASES for each in ORDERS[case]}
FEW = {"1f1b, 1, fp32-bf16"}


@pytest.fixture(scope="module")
def trained(request):
    plans = {key: planned(*key) for key in chosen(request, EACH).values()}
    work = {key: (plan, (CASES[key[0]][0],)) for key, plan in plans.items()}
    return plans, run_in_turn(_train, work)


@pytest.mark.parametrize("case", left_out(EACH, EACH.keys() - FEW))
def test_training(case, trained):
    case, dtypes = EACH[case]
    plans, found = trained
    name = CASES[case][0]
    losses, pieces, computed = zip(*found[case, dtypes])
    assert computed == tuple({TORCH_DTYPE[dtype]} for dtype in dtypes)
    assert losses[0] == losses[1]
    expected, weights = trained_alone(name, plans[case, dtypes])
    np.testing.assert_allclose(losses[0], expected, rtol=5e-4)
    before = {n: p.detach().numpy() for n, p in initialised(EVERY[name].factory).named_parameters()}
    changes = {key: value - before[key] for key, value in weights.items()}
    found_changes = {key: value - before[key] for key, value in joined(pieces).items()}
    floor = 0.1 * np.sqrt(np.mean([np.mean(change**2) for change in changes.values()]))
    assert max(tensor_errors(found_changes, changes, floor).values()) < 0.02


@pytest.mark.parametrize(
    "dtypes",
    left_out([(dtypes,) for dtypes in OVERFLOWS], [(OVERFLOWS[1],)]),
    ids="{0[0]}, then {0[1]}".format,
)
def test_all_stages_drop_a_step_that_overflowed_in_fp16(dtypes, overflowed):
    assert overflowed[dtypes] == [[(True, 2.0**39, True), (False, 2.0**7, False)]] * 2


@pytest.fixture(scope="module")
def overflowed(request):
    wanted = chosen(request, dict.fromkeys(OVERFLOWS), by="dtypes")
    plans = {dtypes: planned("1f1b, 1", dtypes) for dtypes in wanted}
    return run_in_turn(_overflow, {dtypes: (plan, ()) for dtypes, plan in plans.items()})


def _overflow(plan_json: str) -> list[tuple[bool, float, bool]]:
    """Of a step with too large a scale, then of one with a small one: whether it overflowed, the
    scale after it, and whether all gradients are gone."""
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    (batch,) = batches(EVERY["gpt2"], plan.global_batch, 1)
    told = []
    for scale in (2.0**40, 2.0**7):
        engine.scaler.scale = scale
        engine.step(own_samples(plan, engine.comm.rank, batch))
        gone = all(p.grad is None for p in engine.parameters())
        told.append((engine.overflowed, engine.scaler.scale, gone))
    return told
