"""Parameters that get no gradient in a step are left alone by optimizers, as torch leaves them.

The truth is plain PyTorch in one process: weight decay and momentum would move a parameter whose
gradient is zero, but not one whose gradient is None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.extended import chosen, left_out
from helpers.training.models import mean_loss
from helpers.training.reference import (
    Share,
    Trained,
    batches,
    initialised,
    joined,
    pieces_of,
    plan_for,
    worst_error,
)
from helpers.training.staging import (
    EVERY,
    Row,
    own_samples,
    run_in_turn,
    staged_engine,
    staged_plan,
)

MODEL, IN_STAGES, ROUNDS = "branching", "branching_blocks", "rounds"
SAMPLES, STEPS = 5, 5
INLINE = Mode(order="sequential", recompute=False)
NEVER_USED = {"idle.weight", "blocks.0.idle.weight", "blocks.2.branch.bias"}


def optimizer_for(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def in_one_stage(*shares: Share, **settings: Any) -> Plan:
    return plan_for(EVERY[MODEL].factory(), shares, **settings)


def uneven(zero_stage: int, **settings: Any) -> Plan:
    shares = [Share(3, 2, 1), Share(2, 1, 2, INLINE if zero_stage < 2 else Mode())]
    return in_one_stage(*shares, zero_stage=zero_stage, **settings)


PLANS: dict[str, Callable[[], Plan]] = {
    "one process": lambda: in_one_stage(Share(5, 2, 1), zero_stage=3),
    **{f"ZeRO {stage}": partial(uneven, stage) for stage in range(4)},
    "state on the host": lambda: uneven(3, on_host=(1,)),
    "a rank that only stores": lambda: in_one_stage(Share(5, 2, 1), Share(0, 0, 1), zero_stage=3),
    "a rank that stores nothing": lambda: in_one_stage(
        Share(2, 2, 1), Share(3, 1, 0), zero_stage=2
    ),
    "stages": lambda: staged_plan(
        IN_STAGES,
        [Row((Share(5, 1, 1),), (0,)), Row((Share(3, 1, 1), Share(2, 1, 2)), (1, 2))],
        zero_stage=1,
    ),
    "stages in waves": lambda: staged_plan(
        IN_STAGES,
        [Row((Share(3, 1, 1), Share(2, 1, 2)), (0, 1)), Row((Share(5, 1, 1),), (2,))],
        zero_stage=3,
        waves=2,
    ),
    "no gradient from a later stage": lambda: staged_plan(
        ROUNDS,
        [Row((Share(5, 1, 1),), (0,)), Row((Share(3, 1, 1), Share(2, 1, 2)), (1, 2))],
        cuts=[3],
        zero_stage=1,
    ),
    "no gradient through a stage": lambda: staged_plan(
        ROUNDS,
        [Row((Share(5, 1, 1),), (number,)) for number in range(3)],
        cuts=[1, 3],
        zero_stage=1,
    ),
}
CASES = [(name, early) for name in PLANS for early in (False, True)]
FEW = [("ZeRO 3", True), ("stages", False)]


def model_of(name: str) -> str:
    if name.startswith("no gradient"):
        return ROUNDS
    return IN_STAGES if "stages" in name else MODEL


def train(
    plan_json: str, name: str, early: bool
) -> tuple[list[float], Any, dict[str, bool], list[set[str]]]:
    """One rank's losses and pieces; of each parameter whether the optimizer has a state for it; and
    of each step the parameters that have no gradient after it."""
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine(name, plan)
    optimizer = optimizer_for(engine.parameters())
    losses, without = [], []
    for batch in batches(EVERY[name], plan.global_batch, STEPS):
        optimizer.zero_grad()
        own = own_samples(plan, engine.comm.rank, batch)
        losses.append(engine.step(own, optimizer if early else None).item())
        if not early:
            optimizer.step()
        without.append({name for name, p in engine.named_parameters() if p.grad is None})
    kept = {name: p in optimizer.state for name, p in engine.named_parameters()}
    return losses, pieces_of(engine), kept, without


def train_alone(name: str) -> tuple[Trained, list[set[str]]]:
    model = initialised(EVERY[name].factory)
    optimizer = optimizer_for(model.parameters())
    losses, without = [], []
    for batch in batches(EVERY[name], SAMPLES, STEPS):
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        without.append({name for name, p in model.named_parameters() if p.grad is None})
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return Trained(losses, weights), without


@pytest.fixture(scope="module")
def alone():
    return {name: train_alone(name) for name in (MODEL, IN_STAGES, ROUNDS)}


@pytest.fixture(scope="module")
def trained(request):
    wanted = chosen(request, dict.fromkeys(CASES))
    plans = {name: PLANS[name]() for name in {name for name, _ in wanted}}
    cases = {case: (plans[case[0]], (model_of(case[0]), case[1])) for case in wanted}
    return run_in_turn(train, cases)


def test_the_model_uses_some_parameters_in_some_steps(alone):
    without = alone[MODEL][1]
    never, ever = set.intersection(*without), set.union(*without)
    assert never >= NEVER_USED
    assert {"second.weight", "blocks.1.branch.weight"} <= ever - never


@pytest.mark.parametrize(
    "case",
    left_out([(case,) for case in CASES], [(case,) for case in CASES if case not in FEW]),
    ids=str,
)
def test_a_plan_trains_like_one_process(case, alone, trained):
    """Whether the optimizer steps after the step, or while it goes on."""
    of_ranks, (truth, without) = trained[case], alone[model_of(case[0])]
    found = Trained(of_ranks[0][0], joined([pieces for _, pieces, _, _ in of_ranks]))
    assert worst_error(found, truth) < 2e-5
    for _, _, kept, absent in of_ranks:
        assert absent == [step & kept.keys() for step in without]
        assert not any(kept[parameter] for parameter in NEVER_USED & kept.keys())


@pytest.mark.extended
def test_a_gradient_that_a_plan_does_not_send_back_is_refused():
    """The model detached, when it was profiled, what it does not now."""
    rows = [Row((Share(5, 1, 1),), (number,)) for number in range(2)]
    plan = staged_plan(ROUNDS, rows, cuts=[3], zero_stage=1)
    with raises(ModelError, code="gradient-not-planned", what=("output 0", "call 1")):
        run_in_turn(train, {"other": (plan, ("never_rounds", False))})
