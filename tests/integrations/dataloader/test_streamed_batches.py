"""A stream that workers read comes as it does from torch's own loader, cut between ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gpumix.integrations.dataloader.inspect import Batching
from gpumix.integrations.dataloader.sharded_loader import RankCollator, RankLoader
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import left_out

SAMPLES, BATCH = 26, 4


@pytest.fixture(autouse=True)
def nothing_is_left_to_be_freed():
    """Torch's workers are forked: what holds a thread of this process must not be freed in them."""
    gc.collect()


class SelfSharding(IterableDataset):
    """Each worker has every so manieth sample, as torch's documentation does it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return ({"row": torch.tensor(n)} for n in range(first, SAMPLES, step))


class Ranged(IterableDataset):
    """Has a beginning and an end, which whoever starts a worker may set."""

    begin, end = 0, SAMPLES

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"row": torch.tensor(n)} for n in range(self.begin, self.end))


def halved(worker: int) -> None:
    """The other way of torch's documentation."""
    info = get_worker_info()
    half = SAMPLES // 2
    info.dataset.begin, info.dataset.end = half * info.id, half * (info.id + 1)


def in_shards() -> Any:
    from datasets import Dataset

    rows = Dataset.from_dict({"row": list(range(SAMPLES))})
    return rows.to_iterable_dataset(num_shards=2).map(lambda row: {"row": row["row"] * 2})


def first_rank(samples: int) -> list[range]:
    """Of unlike shares, in micro-batches of unlike sizes."""
    return [range(min(2, samples)), range(2, min(3, samples))]


def second_rank(samples: int) -> list[range]:
    return [range(3, max(3, samples))]


STREAMS = {
    "shards": (in_shards, None),
    "its own shard": (SelfSharding, None),
    "a range of each worker": (Ranged, halved),
}


CASES = [(name, drops) for drops in (False, True) for name in STREAMS]


@pytest.mark.parametrize(
    ("name", "drop_last"),
    left_out(CASES, {*CASES} - {("shards", False), ("its own shard", True)}),
)
def test_workers_give_each_sample_once_in_the_order_of_torchs_loader(name, drop_last):
    make, begins = STREAMS[name]
    settings = {"num_workers": 2, "worker_init_fn": begins, "drop_last": drop_last}
    expected = [b["row"].tolist() for b in DataLoader(make(), BATCH, **settings)]
    assert [len(rows) for rows in expected] == [4] * 6 + ([] if drop_last else [1, 1])

    given = Batching.of(DataLoader(make(), BATCH, **settings))
    found = [
        [
            batch["row"].tolist()
            for batch in given.make_rank_loader(BATCH, of, collated(), RankLoader)
        ]
        for of in (first_rank, second_rank)
    ]
    assert [one + other for one, other in zip(*found, strict=True)] == expected


def collated() -> RankCollator:
    return RankCollator(torch.utils.data.default_collate)


def test_batches_out_of_order_are_refused():
    loader = DataLoader(SelfSharding(), BATCH, num_workers=2, in_order=False)
    with raises(InputError, code="loader-out-of-order", what="in_order"):
        Batching.of(loader)
