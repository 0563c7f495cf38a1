"""What tests of AdamW in 8 bits share: a model whose parameters end in the middle of blocks, and
the same update written anew, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import gpumix
from gpumix.engine.engine import Engine
from helpers.training.models import NextToken, same_everywhere
from helpers.training.reference import Share, engine_for, initialised
from helpers.training.whole_optimizers import gradient

BLOCK = 256
WIDTH, VOCABULARY, LENGTH = 96, 67, 8
SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
FACTORS = ("lr", "eps", "weight_decay")
Array = np.ndarray


class WideBlock(nn.Module):
    """Two matrices of 4800 elements, a stack of 4551, and small vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 50)
        self.out = nn.Linear(50, WIDTH)
        self.filters = nn.Parameter(torch.randn(3, 37, 41))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.into(self.norm(x)))) * self.filters.mean()


class Wide(NextToken):
    """Such blocks, with an embedding and a head of 6432 elements each: none is used twice, so a
    gradient of two samples is a sum of two."""

    def __init__(self) -> None:
        super().__init__(WideBlock, width=WIDTH, vocabulary=VOCABULARY)


def wide() -> nn.Module:
    return same_everywhere(Wide)


def make(parameters: Any, **changes: Any) -> gpumix.AdamW8bit:
    return gpumix.AdamW8bit(parameters, **{**SETTINGS, **changes})


def wide_engine(shares: Sequence[Share], **settings: Any) -> Engine:
    return engine_for(wide, shares, **{"optimizer_state": "8bit", **settings})


def batch_of(step: int, samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"ids": torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)}


def trained_alone(factory: Any, steps: int, **changes: Any) -> tuple[nn.Module, gpumix.AdamW8bit]:
    """The unsharded model and its optimizer after steps by given gradients."""
    model = initialised(factory)
    optimizer = make((p for p in model.parameters() if p.requires_grad), **changes)
    for step in range(steps):
        for name, p in model.named_parameters():
            p.grad = gradient(name, p.shape, step) if p.requires_grad else None
        optimizer.step()
    return model, optimizer


# -- the same, written anew ------------------------------------------------------------------------


def values_of_map(signed: bool) -> Array:
    """By the paper: a sign, an exponent of the base 10 and a linear fraction; 0 and 1 too."""
    found = [0.0, 1.0]
    for exponent in range(-6, 1):
        steps = 2 ** (exponent + 6 + (not signed))
        width = 0.9 / steps
        middles = [10.0**exponent * (0.1 + width * (n + 0.5)) for n in range(steps)]
        found += middles + ([-m for m in middles] if signed else [])
    assert len(found) == 256
    return np.sort(np.array(found))


class Moment:
    """A moment of one parameter: bytes, and maxima of blocks."""

    def __init__(self, numel: int, signed: bool) -> None:
        self.map = values_of_map(signed)
        self.codes = np.zeros(numel, np.uint8)
        self.maxima = np.zeros(-(-numel // BLOCK))

    def blocks(self) -> Iterator[tuple[int, slice]]:
        for number, begin in enumerate(range(0, len(self.codes), BLOCK)):
            yield number, slice(begin, begin + BLOCK)

    def read(self) -> Array:
        found = np.zeros(len(self.codes))
        for number, part in self.blocks():
            found[part] = self.map[self.codes[part]] * self.maxima[number]
        return found

    def write(self, values: Array) -> None:
        for number, part in self.blocks():
            most = np.abs(values[part]).max()
            self.maxima[number] = most
            scaled = values[part] / max(most, 1e-38)
            self.codes[part] = np.abs(scaled[:, None] - self.map).argmin(1)


def step_anew(values: Array, slope: Array, moments: list[Moment], step: int) -> Array:
    """The values after a step, computed in fp64."""
    (beta1, beta2), (rate, eps, decay) = SETTINGS["betas"], (SETTINGS[k] for k in FACTORS)
    mean, square = moments
    first = beta1 * mean.read() + (1 - beta1) * slope
    second = beta2 * square.read() + (1 - beta2) * slope**2
    root = np.sqrt(second / (1 - beta2**step)) + eps
    mean.write(first)
    square.write(second)
    return values * (1 - rate * decay) - rate * first / (1 - beta1**step) / root
