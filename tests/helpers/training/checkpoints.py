"""What tests of state and checkpoints share: a model with every kind of tensor, its training, and
comparisons to the bit."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from gpumix.engine.engine import Engine
from gpumix.engine.sharding.state_dict import WholeTensor
from gpumix.train.checkpoint.checkpointer import Checkpointer
from helpers.training.models import NextToken, same_everywhere
from helpers.training.reference import Share, engine_for, own_rows

VOCABULARY, LENGTH = 64, 8
ALONE = [Share(6, 2, 1)]
UNEVEN = [Share(2, 1, 1), Share(1, 1, 0), Share(0, 0, 3), Share(3, 2, 2)]
Array = np.ndarray
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Block(nn.Module):
    """A block with one of every kind of parameter and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.filters = nn.Parameter(torch.randn(3, 4, 5))
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(16, 16) / 4, requires_grad=False)
        self.order = nn.Parameter(torch.randperm(16), requires_grad=False)
        self.register_buffer("scale", torch.rand(16))
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.linear(x)[..., self.order] * self.filters.sum() + self.nothing.sum()
        return x + torch.tanh(mixed @ self.frozen) * self.gain * self.scale


class Odd(NextToken):
    """Such blocks, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__(Block, width=16, vocabulary=VOCABULARY)
        self.head.weight = self.embedding.weight


def odd() -> nn.Module:
    return same_everywhere(Odd)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6)


def train(
    engine: Engine, optimizer: torch.optim.Optimizer, shares: Sequence[Share], steps: range
) -> list[float]:
    """The losses of global steps, whose data depend on nothing but the step."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        samples = sum(share.samples for share in shares)
        batch = {"ids": torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)}
        losses.append(engine.step(own_rows(batch, shares, engine.comm.rank)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(
    shares: Sequence[Share],
    steps: int = 2,
    make: MakeOptimizer = adamw,
    factory: Callable[[], nn.Module] = odd,
    **settings: Any,
) -> tuple[Engine, torch.optim.Optimizer]:
    """An engine and its optimizer after some steps."""
    engine = engine_for(factory, shares, **settings)
    optimizer = make(engine.parameters())
    train(engine, optimizer, shares, range(steps))
    return engine, optimizer


def blank(
    shares: Sequence[Share], make: MakeOptimizer = adamw, **settings: Any
) -> tuple[Engine, torch.optim.Optimizer]:
    """An engine whose every value is wrong, and an optimizer without state."""
    engine = engine_for(odd, shares, **settings)
    for piece in engine.pieces():
        piece.local.data.fill_(7)
    for buffer in engine.model.buffers():
        buffer.fill_(7)
    return engine, make(engine.parameters())


def checkpointer(folder: Path, keep: int = 2, timeout_s: float = 20.0) -> Checkpointer:
    """Of all ranks of the default group, on a group of its own."""
    group = None
    if dist.is_initialized():
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
    return Checkpointer(folder, keep=keep, group=group)


# -- comparison ------------------------------------------------------------------------------------


def model_values(engine: Engine) -> dict[str, Array]:
    """The whole model, to be sent to the parent."""
    return {name: tensor.numpy() for name, tensor in engine.state_dict().items()}


def optimizer_values(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's optimizer state: (start, values) of each state's part, what is of a whole
    parameter, or a number."""

    def sent(value: Any) -> Any:
        if isinstance(value, tuple):
            (part,) = value
            return part.start, part.local.cpu().numpy().copy()
        tensor = value.tensor if isinstance(value, WholeTensor) else value
        return tensor.cpu().numpy().copy() if isinstance(tensor, torch.Tensor) else tensor

    return {
        f"{parameter}.{name}": sent(value)
        for parameter, values in engine.optimizer_state(optimizer).items()
        for name, value in values.items()
    }


def whole(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' optimizer state in one; what is not cut must be the same everywhere."""
    together: dict[str, Any] = {}
    for name in of_ranks[0]:
        values = [values[name] for values in of_ranks]
        if isinstance(values[0], tuple):
            parts = sorted(values, key=lambda v: (v[0], len(v[1])))
            together[name] = np.concatenate([part for _, part in parts])
        else:
            assert len({np.asarray(v).tobytes() for v in values}) == 1, name
            together[name] = values[0]
    return together


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal to the bit, in dtype and in shape."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert type(found[name]) is type(expected[name]), name
        a, b = np.asarray(found[name]), np.asarray(expected[name])
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name
