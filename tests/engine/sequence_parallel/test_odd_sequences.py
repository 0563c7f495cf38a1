"""What a model of one's own does beside divided modules comes out right, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

from gpumix.engine.model.deferred_init import build
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.training.reference import SEED, initialised, optimizer_for
from helpers.training.staging import rows, staged_plan

WIDTH, POSITIONS, SAMPLES = 16, 8, 4
STYLES = {"up": "colwise", "down": "rowwise", "kv": "colwise"}
SCALE: ContextVar[float] = ContextVar("scale")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Routed(Block):
    """Gives what it routes by as well, for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        gates = torch.softmax(self.gate(self.norm(x)), -1)
        return x + gates[..., :1] * self.down(torch.relu(self.up(self.norm(x)))), gates


class Conditioned(Block):
    """Scales its positions by what is trained elsewhere."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        scale = 1 + other.mean(1, keepdim=True)
        return x + self.down(torch.relu(self.up(self.norm(x) * scale)))


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (-1, WIDTH // 2)).transpose(1, 2)


class Reading(Block):
    """Looks into a second sequence, and takes that as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)

    def read(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        queries, keys = _heads(self.up(self.norm(x))), _heads(self.kv(other))
        weights = torch.softmax(queries @ keys.transpose(2, 3), -1)
        return x + self.down((weights @ keys).transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.read(x, other)


class ReadingNormed(Reading):
    """And normalises it itself: of that norm each rank comes to the whole gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_of_other = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.read(x, self.norm_of_other(other))


class Gated(Block):
    """Mixes positions as soon as its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.gate * x.cumsum(1), other)


class Scaled(Block):
    """Looks for a number in the context that it is called in."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(x * SCALE.get(), other)


class Inner(nn.Module):
    """Drops before its divided layers: there all ranks have all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5, self.training)
        return self.down(torch.relu(self.up(x)))


class Dropping(Block):
    def __init__(self) -> None:
        super().__init__()
        del self.up, self.down
        self.inner = Inner()

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Own(nn.Module):
    """Two blocks between linear layers; `between` happens to what the first gives."""

    def __init__(self, block: type[Block], between: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.of_other = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        SCALE.set(0.5)
        x, other, extra = self.before(x), self.of_other(other), x.new_zeros(())
        for block in self.blocks:
            x = block(x, other)
            if isinstance(x, tuple):
                x, gates = x
                extra = extra + gates.mean(1).square().sum()
            self.between(x)
        return self.head(x).square().sum() + extra, torch.tensor(float(x.numel()))


def _nothing(x: torch.Tensor) -> None: ...


def _halved(x: torch.Tensor) -> None:
    x.mul_(0.5)


def _first_cleared(x: torch.Tensor) -> None:
    x[:, 0] = 0.0


# Blocks, what happens between them, and how long the other sequence is in each step.
RIGHT: dict[str, tuple[type[Block], Callable[[torch.Tensor], Any], tuple[int, ...]]] = {
    "written into between units": (Block, _halved, (3,)),
    "a position written into between units": (Block, _first_cleared, (3,)),
    "a second sequence": (Reading, _nothing, (5, 5)),
    "a second sequence as long as a part": (Reading, _nothing, (4, 5)),
    "as long as a part in a later step": (Reading, _nothing, (5, 4)),
    "as long as the first one": (Reading, _nothing, (8, 3)),
    "a value of the context": (Scaled, _nothing, (3,)),
}
REFUSED = {
    "another output of each position": (Routed, "what it returns is of shape"),
    "a trained input at all positions": (Conditioned, "the gradient of an input"),
    "a norm of the second sequence": (ReadingNormed, "the gradient of 'norm_of_other"),
    "a gate that is closed at first": (Gated, "is not that of each position"),
}


@pytest.fixture(scope="module")
def told(request) -> dict[str, Any]:
    one, other = run_ranks(_all, 2, list(chosen(request, RIGHT | REFUSED)))
    assert one == other
    return dict(one)


def _all(cases: list[str]) -> dict[str, Any]:
    return (
        {case: _steps(*given) for case, given in RIGHT.items() if case in cases}
        | {case: _refused(block) for case, (block, _) in REFUSED.items() if case in cases}
        | {f"dropping, {sequence}": _dropped(sequence) for sequence in (True, False)}
    )


def _steps(block: type[Block], between: Any, lengths: tuple[int, ...]) -> list[float]:
    engine = _engine(block, between)
    optimizer, losses = optimizer_for(engine.parameters()), []
    for length in (*lengths, lengths[0]):  # the last one shows the weights that came out
        optimizer.zero_grad()
        losses.append(engine.step(_batch(length)).item())
        optimizer.step()
    return losses


def _refused(block: type[Block]) -> str:
    try:
        _engine(block, _nothing).step(_batch(3))
    except ModelError as error:
        return str(error).partition(": ")[2]  # behind the rank
    return "nothing"


def _dropped(sequence: bool) -> list[float]:
    """Losses and norms of gradients."""
    engine, told = _engine(Dropping, _nothing, sequence=sequence), []
    for _ in range(2):
        told += [engine.step(_batch(3)).item(), engine.gradient_norm().item()]
    return told


def _engine(block: type[Block], between: Any, *, sequence: bool = True) -> Any:
    model = build(lambda: Own(block, between), SEED)
    (row,) = rows([SAMPLES], micro_batch=SAMPLES, tensor=[2])
    plan: Plan = staged_plan("llama", [row])
    names = ["blocks.0", "blocks.1"]
    stage = Stage(units=names, workers=plan.stages[0].workers, tensor=2, sequence=sequence)
    update = {"stages": (stage,), "model": split_into_units(model).fingerprint()}
    there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    styles = {f"**.{name}": style for name, style in STYLES.items() if name in there}
    return prepare(model, plan.model_copy(update=update), tensor=styles)


def _batch(length: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(length)
    return {
        "x": torch.randn(SAMPLES, POSITIONS, WIDTH, generator=drawn),
        "other": torch.randn(SAMPLES, length, WIDTH, generator=drawn),
    }


FEW = {"as long as a part in a later step", "a gate that is closed at first"}


@pytest.mark.parametrize("case", left_out(RIGHT, RIGHT.keys() - FEW))
def test_comes_out_as_in_one_process(told, case):
    block, between, lengths = RIGHT[case]
    model = initialised(lambda: Own(block, between))
    optimizer, expected = optimizer_for(model.parameters()), []
    for length in (*lengths, lengths[0]):
        optimizer.zero_grad()
        loss, count = model(**_batch(length))
        (loss / count).backward()
        optimizer.step()
        expected.append((loss / count).item())
    assert told[case] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", left_out(REFUSED, REFUSED.keys() - FEW))
def test_is_refused(told, case):
    assert "the positions of unit 'blocks.0' cannot be divided" in told[case]
    assert REFUSED[case][1] in told[case]


def test_what_all_ranks_drop_they_drop_alike(told):
    """As where positions are not divided: else each would come to another loss's gradient."""
    found, expected = told["dropping, True"], told["dropping, False"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert expected[0] != expected[2]  # each step drops something else
