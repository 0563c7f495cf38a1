"""State that modules keep beside parameters and buffers is in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import checkpointer
from helpers.training.models import Block, Regression, vectors
from helpers.training.reference import Share, engine_for, own_rows

BATCH = 4
SHARES = [Share(1, 1, 1), Share(BATCH - 1, 2, 2)]


class Remembers(Block):
    """How often it ran, and a tensor of that."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = {"calls": 0, "last": torch.zeros(2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls = self.state["calls"] + 1
        self.state = {"calls": calls, "last": torch.full((2,), float(calls))}
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Unreadable(Remembers):
    def get_extra_state(self) -> Any:
        return nn.ReLU()


def engine_of(block: type[Block], shares: list[Share]) -> Any:
    engine = engine_for(lambda: Regression([block(), block()]), shares)
    return engine, torch.optim.AdamW(engine.parameters())


def _save(folder: Path) -> list[int]:
    engine, optimizer = engine_of(Remembers, SHARES)
    batch = vectors(BATCH, torch.Generator().manual_seed(0))
    engine.step(own_rows(batch, SHARES, engine.comm.rank), optimizer)
    checkpointer(folder).save(1, engine, optimizer, cursor={})
    return [block.state["calls"] for block in engine.model.blocks]


def _load(folder: Path) -> list[tuple[int, float]]:
    engine, optimizer = engine_of(Remembers, [Share(BATCH, 2, 1)])
    checkpointer(folder).load(engine, optimizer)
    states = [block.state for block in engine.model.blocks]
    return [(state["calls"], state["last"][0].item()) for state in states]


def test_they_are_the_same_on_all_ranks_and_come_back(tmp_path):
    saved = run_ranks(_save, 2, tmp_path)
    assert saved[0] == saved[1]
    assert min(saved[0]) > 0
    (loaded,) = run_ranks(_load, 1, tmp_path)
    assert loaded == [(calls, float(calls)) for calls in saved[0]]


def _refused(folder: Path) -> None:
    engine, optimizer = engine_of(Unreadable, [Share(BATCH, 2, 1)])
    with raises(InputError, code="extra-state-not-storable"):
        checkpointer(folder).save(0, engine, optimizer, cursor={})


def test_one_that_cannot_be_read_without_running_code_is_refused(tmp_path):
    run_ranks(_refused, 1, tmp_path)
    assert not list(tmp_path.glob("*/checkpoint.json"))


def _of_another_model(folder: Path) -> None:
    engine, optimizer = engine_of(Block, [Share(BATCH, 2, 1)])
    with raises(InputError, code="checkpoint-of-another-model"):
        checkpointer(folder).load(engine, optimizer)


@pytest.mark.extended
def test_a_model_without_them_does_not_go_on(tmp_path):
    run_ranks(_save, 2, tmp_path)
    run_ranks(_of_another_model, 1, tmp_path)
