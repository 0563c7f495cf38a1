"""Tensor-parallel groups that divide the positions of samples too train like one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpumix.engine.model.deferred_init import build
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.errors import GpumixError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, Mode, Stage
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, Batch
from helpers.training.reference import SEED, batches, initialised, optimizer_for, train_plainly
from helpers.training.staging import own_samples, rows, staged_engine, staged_plan
from helpers.training.turns import assert_case, in_turn

KEPT = Mode(recompute=False)
TP_GROUP = rows([5], tensor=[2], sequence=True)
TWO = rows([4, 3], tensor=[2], sequence=True)
THEN_ONE = rows([6], [6], tensor=[2, 1], sequence=True)
ONE_THEN = rows([6], [6], tensor=[1, 2], sequence=True)
EACH = rows([6], [6], tensor=[2, 2], sequence=True)
IN_ONES = rows([4], [4], tensor=[2, 2], sequence=True, micro_batch=1, mode=KEPT)
ROUND = rows([6], [6], tensor=[2, 2], sequence=True) * 2


def tp_group(mode: Mode) -> Any:
    return rows([5], tensor=[2], sequence=True, mode=mode)


CASES = {
    "Qwen3": ("qwen3", TP_GROUP, {"zero_stage": 3}),
    "T5": ("t5", TP_GROUP, {"zero_stage": 1}),
    "sequential": ("gpt2", tp_group(Mode(order="sequential")), {"zero_stage": 1}),
    "sequential, kept": (
        "t5",
        tp_group(Mode(order="sequential", recompute=False)),
        {"zero_stage": 0},
    ),
    "chunked cross-entropy": ("llama", tp_group(Mode(head="chunked")), {"zero_stage": 2}),
    "inputs on the host": ("bert", tp_group(Mode(boundary="host")), {"zero_stage": 3}),
    "more ranks in a TP group": ("gpt2", rows([3], tensor=[4], sequence=True), {"zero_stage": 1}),
    "two TP groups": ("qwen3", TWO, {"zero_stage": 2}),
    "two TP groups that divide all": ("bert", TWO, {"zero_stage": 3}),
    "a TP group, then one": ("qwen3", THEN_ONE, {"zero_stage": 3}),
    "one, then a TP group": ("qwen3", ONE_THEN, {"zero_stage": 0}),
    "only one of two TP groups": ("llama", [EACH[0], EACH[1]._replace(sequence=False)], {}),
    "gpipe": ("t5", IN_ONES, {"zero_stage": 0, "schedule": "gpipe"}),
    "zero-bubble": ("qwen3", IN_ONES, {"zero_stage": 1, "schedule": "zero-bubble"}),
    "interleaved": ("bert", ROUND, {"zero_stage": 3, "schedule": "interleaved"}),
}


trained = in_turn(CASES)
FEW = {"one, then a TP group"}


@pytest.mark.slow
@pytest.mark.parametrize("case", left_out(CASES, CASES.keys() - FEW))
def test_training_is_that_of_one_process(case, trained):
    assert_case(case, trained)


# -- lengths ---------------------------------------------------------------------------------------

LENGTHS = (2, 11)  # of which some ranks of four have a position less, or none


def test_lengths_that_cannot_be_divided_evenly():
    plan = staged_plan("gpt2", rows([3], tensor=[4], sequence=True), zero_stage=1)
    losses = run_ranks(_of_lengths, 4, plan.model_dump_json())
    alone = train_plainly(ARCHITECTURES["gpt2"].factory, _shortened(plan.global_batch))
    assert losses == [pytest.approx(alone.losses, rel=1e-5)] * 4


def _shortened(samples: int) -> list[Batch]:
    every = batches(ARCHITECTURES["gpt2"], samples, len(LENGTHS))
    return [{k: v[:, :n] for k, v in batch.items()} for batch, n in zip(every, LENGTHS)]


def _of_lengths(plan_json: str) -> list[float]:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    optimizer, losses = optimizer_for(engine.parameters()), []
    for batch in _shortened(plan.global_batch):
        optimizer.zero_grad()
        losses.append(engine.step(own_samples(plan, engine.comm.rank, batch)).item())
        optimizer.step()
    return losses


# -- models of one's own ---------------------------------------------------------------------------

WIDTH, POSITIONS, SAMPLES = 16, 8, 4


class Block(nn.Module):
    """Linear layers in the block itself, not in a module that could be given all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Mixed(Block):
    """Its positions depend on each other outside of the linear layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Dropping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Own(nn.Module):
    """Two blocks; `seen` is what comes out of them."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        self.seen.append(x.detach() * 1.0)
        return x.square().sum(), torch.tensor(float(x.numel()))


STYLES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def own(block: type[Block], mode: Mode = PLAIN, styles: dict[str, str] = STYLES) -> Any:
    model = build(lambda: Own(block), SEED)
    (row,) = rows([SAMPLES], micro_batch=SAMPLES, tensor=[2], mode=mode)
    plan = staged_plan("llama", [row])
    names = ["blocks.0", "blocks.1"]
    stage = Stage(units=names, workers=plan.stages[0].workers, tensor=2, sequence=True)
    update = {"stages": (stage,), "model": split_into_units(model).fingerprint()}
    return prepare(model, plan.model_copy(update=update), tensor=styles)


def _vectors(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def told():
    """What both ranks of a tensor-parallel group come to, which are started once."""
    return run_ranks(_all_of_a_tp_group, 2, timeout_s=120)


def _all_of_a_tp_group() -> dict[str, Any]:
    return {
        "own": _steps_of_own(),
        "dropped": _dropped(),
        "refused": {message: _refusal(call) for message, call in BAD.items()},
    }


def test_blocks_whose_own_layers_are_divided(told):
    model = initialised(lambda: Own(Block))
    optimizer, expected = optimizer_for(model.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        loss, count = model(_vectors(SAMPLES, POSITIONS, WIDTH))
        (loss / count).backward()
        optimizer.step()
        expected.append((loss / count).item())
    assert [of_rank["own"] for of_rank in told] == [pytest.approx(expected, rel=1e-6)] * 2


def _steps_of_own() -> list[float]:
    engine = own(Block)
    optimizer, losses = optimizer_for(engine.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(engine.step(_vectors(SAMPLES, POSITIONS, WIDTH)).item())
        optimizer.step()
    return losses


def test_dropout_differs_by_position_and_is_the_same_when_a_unit_is_run_again(told):
    """And evaluation drops nothing."""
    one, other = (of_rank["dropped"] for of_rank in told)
    seen, norms, evaluated = one
    assert torch.equal(seen[0], other[0][0]) and torch.equal(seen[0], seen[1])
    first, second = (seen[0] == 0).chunk(2, 1)
    assert not torch.equal(first, second)
    assert 0.3 < (seen[0] == 0).float().mean() < 0.7
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    model = initialised(lambda: Own(Dropping)).eval()
    loss, count = model(_vectors(SAMPLES, POSITIONS, WIDTH))
    assert evaluated == pytest.approx((loss / count).item(), rel=1e-6)


def _dropped() -> tuple[list[torch.Tensor], list[float], float]:
    """With recompute and without: what came out, and the norm of the gradient."""
    seen, norms = [], []
    for mode in (Mode(), KEPT):
        engine = own(Dropping, mode)
        engine.step(_vectors(SAMPLES, POSITIONS, WIDTH))
        seen.append(engine.model.seen[-1])
        norms.append(engine.gradient_norm().item())
    return seen, norms, engine.evaluate(_vectors(SAMPLES, POSITIONS, WIDTH)).item()


class Inner(nn.Module):
    """A parameter beside divided layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)


class Unclear(Block):
    def __init__(self) -> None:
        super().__init__()
        del self.up, self.down
        self.inner = Inner()


BAD: dict[str, Callable[[], Any]] = {
    "the positions of unit 'blocks.0' cannot be divided": (
        lambda: own(Mixed).step(_vectors(SAMPLES, POSITIONS, WIDTH))
    ),
    # Used before divided layers, or behind them?
    "beside parameter 'blocks.0.inner.scale'": (
        lambda: own(Unclear, styles={"**.up": "colwise", "**.down": "rowwise"})
    ),
    "given no hidden states whose positions could be divided": (
        lambda: own(Block).step(_vectors(SAMPLES, WIDTH))
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_divided_is_refused(message, told):
    for of_rank in told:
        assert message in of_rank["refused"][message]


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except GpumixError as error:
        return str(error)
    return "nothing"


def test_positions_are_divided_in_tp_groups_alone():
    with pytest.raises(ValueError, match="only workers of a tensor-parallel group divide"):
        staged_plan("llama", [rows([4])[0]._replace(sequence=True)])
