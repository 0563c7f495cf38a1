"""Where a rank stands is told with the unit that it computes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from gpumix.engine.comm.collective_progress import describe_main_thread
from gpumix.engine.comm.step_recorder import SILENT, Recorder
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import ROOT
from helpers.training.models import WIDTH, Block, Regression, vectors
from helpers.training.reference import engine_alone

told: list[str] = []


def tell() -> None:
    found = re.search(r"\((.*)\)$", describe_main_thread())
    told.append(found[1] if found else "")


class Tells(torch.autograd.Function):
    """The identity, which tells on the way there and back."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        tell()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        tell()
        return gradient


class Telling(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Tells.apply(x))


class TellingHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Tells.apply(x))


def model() -> nn.Module:
    made = Regression([Telling(), Telling()])
    made.leave = TellingHead(WIDTH, 4)
    return made


@pytest.mark.parametrize("order", ["layered", "sequential"])
@pytest.mark.parametrize("recompute", [True, False])
def test_what_is_computed(order, recompute):
    mode = Mode(order=order, recompute=recompute)
    engine = engine_alone(model, 2, 2, mode=mode, zero_stage=1)
    batch = vectors(2, torch.Generator().manual_seed(0))
    there = ["forward of unit 'blocks.0'", "forward of unit 'blocks.1'", "head"]
    back = []
    for unit in ("blocks.1", "blocks.0"):
        # Without recompute autograd goes through all units of the sequential order at once.
        of_unit = f" of unit '{unit}'" if recompute or order == "layered" else ""
        back += [f"backward{of_unit}"] * (2 if recompute else 1)
    head_back = "head" if order == "layered" else "backward"
    told.clear()
    engine.step(batch)
    tell()
    assert told == [*there, head_back, *back, ""]
    told.clear()
    engine.evaluate(batch)
    tell()
    assert told == [*there, ""]


def test_a_step_that_fails_computes_nothing_any_more():
    engine = engine_alone(model, 2, 2)
    batch = vectors(2, torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError):
        engine.step(batch | {"target": torch.zeros(2, 3, 3)})
    told.clear()
    tell()
    assert told == [""]


def test_after_the_optimizer_nothing_is_computed():
    engine = engine_alone(model, 2, 2)
    for record in (SILENT, Recorder(engine.comm, engine.plan.workers[0])):
        told.clear()
        record.begin()
        record.computes("optimizer", ROOT)
        tell()
        record.end()
        tell()
        assert told == ["optimizer", ""]
