"""Collate functions that make a sample's values from the others are refused, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from gpumix.integrations.dataloader.mixed_samples import refuse_mixing
from gpumix.schema.errors import InputError
from helpers.errors import raises

SAMPLES = [
    {"x": torch.randn(4, generator=torch.Generator().manual_seed(number)), "w": torch.rand(())}
    for number in range(4)
]


def mixed_up(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    part = random.random()
    batch["x"] = part * batch["x"] + (1 - part) * batch["x"][torch.randperm(len(samples))].roll(
        1, 0
    )
    return batch


def of_weights_that_add_up_to_one(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    return batch | {"w": batch["w"] / batch["w"].sum()}


def normed(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    return batch | {"x": (batch["x"] - batch["x"].mean(0)) / batch["x"].std(0)}


def sorted_by_weight(samples: list[Any]) -> Any:
    return default_collate(sorted(samples, key=lambda one: float(one["w"])))


def masked(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    return batch | {"x": batch["x"].masked_fill(torch.rand(batch["x"].shape) < 0.3, 0.0)}


class Counted:
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return batch | {"x": batch["x"] + torch.randn(4, generator=self.generator)}


def flat(samples: list[Any]) -> Any:
    return {"x": torch.cat([one["x"] for one in samples])[None]}


@pytest.mark.parametrize("collate", [mixed_up, of_weights_that_add_up_to_one, normed])
def test_mixed_ones_are_refused(collate: Callable[[list[Any]], Any]):
    with raises(InputError, code="collate-mixes-samples"):
        refuse_mixing(collate, SAMPLES)


@pytest.mark.parametrize("collate", [default_collate, sorted_by_weight, masked, Counted(), flat])
def test_others_are_not(collate: Callable[[list[Any]], Any]):
    before = torch.get_rng_state(), random.getstate()
    refuse_mixing(collate, SAMPLES)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    refuse_mixing(collate, SAMPLES[:2])
