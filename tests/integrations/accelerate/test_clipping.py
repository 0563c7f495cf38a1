"""Parameters that a loop names when it clips gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpumix import prepare
from gpumix.integrations.accelerate.clipping import select_clipped_pieces
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.training.reference import Share, plan_for


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def sharded():
    model = Blocks()
    names = {id(p): name for name, p in model.named_parameters()}
    kept = list(model.parameters())
    return model, prepare(model, plan_for(Blocks(), [Share(4, 2, 1)])), names, kept


def test_all_parameters_are_those_of_the_model_before_and_after_and_of_groups(sharded):
    model, engine, names, kept = sharded
    groups = list(engine.parameters())
    for given in (kept, model.parameters(), groups):
        assert select_clipped_pieces(given, model, engine, names) is None


def test_some_parameters_are_their_pieces(sharded):
    model, engine, names, _ = sharded
    first = next(iter(dict(model.named_parameters())))
    pieces = [piece for name, piece in engine.named_parameters() if name == first]
    given = dict(model.named_parameters())[first]
    assert [id(p) for p in select_clipped_pieces(given, model, engine, names) or ()] == [
        id(p) for p in pieces
    ]


def test_parameters_of_another_model_are_refused(sharded):
    model, engine, names, _ = sharded
    with raises(InputError, code="clip-without-parameters"):
        select_clipped_pieces([nn.Parameter(torch.ones(2))], model, engine, names)
