"""Ranks whose datasets differ are told so before anything is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from gpumix.integrations.dataloader.same_data import check_same_data
from gpumix.schema.errors import InputError
from helpers.processes.harness import run_ranks


class Rows(Dataset[Any]):
    def __init__(self, rows: list[int], own_draws: bool = False, draws: bool = False) -> None:
        self.rows, self.draws = rows, draws
        self.generator = torch.Generator().manual_seed(dist.get_rank()) if own_draws else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        x = torch.full((3,), float(self.rows[place]))
        if self.draws or self.generator is not None:
            x += torch.rand(3, generator=self.generator)
        return {"x": x, "name": str(self.rows[place])}


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return ({"x": torch.tensor(row)} for row in self.rows)


def whole(rank: int) -> list[int]:
    return list(range(12))


def shared_out(rank: int) -> list[int]:
    return whole(rank)[rank::2]


def fewer(rank: int) -> list[int]:
    return whole(rank)[: 12 - rank]


def shuffled(rank: int) -> list[int]:
    return torch.randperm(12, generator=torch.Generator().manual_seed(rank)).tolist()


DATA = {
    "the same": lambda rank: Rows(whole(rank)),
    "the same with global draws": lambda rank: Rows(whole(rank), draws=True),
    "the same with draws of its own": lambda rank: Rows(whole(rank), own_draws=True),
    "the same stream": lambda rank: Stream(whole(rank)),
    "shared out": lambda rank: Rows(shared_out(rank)),
    "fewer": lambda rank: Rows(fewer(rank)),
    "shuffled": lambda rank: Rows(shuffled(rank)),
    "a stream that is shared out": lambda rank: Stream(shared_out(rank)),
}


def _checked() -> dict[str, str]:
    found = {}
    for name, make in DATA.items():
        torch.manual_seed(dist.get_rank())  # programs may seed each rank otherwise
        before = torch.get_rng_state()
        try:
            check_same_data(make(dist.get_rank()))
            found[name] = ""
        except InputError as error:
            found[name] = error.why
        assert torch.equal(torch.get_rng_state(), before)
    return found


@pytest.fixture(scope="module")
def checked() -> list[dict[str, str]]:
    return run_ranks(_checked, 2)


@pytest.mark.parametrize("name", DATA)
def test_ranks_agree_whether_their_data_differ(checked, name):
    first, second = (told[name] for told in checked)
    assert first == second
    wanted = "rank 0 has 12, rank 1 has 11 samples" if name == "fewer" else "rank 1 has other"
    assert first == "" if name.startswith("the same") else wanted in first
