"""Copies to a device beside what it computes: their order, and when memory is used again."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch

from gpumix.data.loader import Loader
from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.workers.batch_layout import Batch
from gpumix.data.workers.device_copy import CopyStream, InFlightBatches
from gpumix.data.workers.padding import PER_TOKEN_KEYS
from gpumix.engine.batch import batch_split
from helpers.samples.sources import Numbers


class FakeWay:
    """Copies at once, as far as values go; events are numbers, that end when the test says so.

    `told` is what a GPU would see, in order: what its stream of copies is given, and behind which
    event the stream that computes goes on.
    """

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.ended = 0
        self.room = 10**9

    def send(self, batch: Batch) -> tuple[Batch, int]:
        if self.room <= 0:
            raise torch.OutOfMemoryError("no room")
        self.room -= 1
        number = sum(what == "sent" for what, _ in self.told) + 1
        self.told.append(("sent", number))
        return {key: value.clone() for key, value in batch.items()}, number

    def receive(self, batch: Batch, sent: int) -> None:
        self.told.append(("received", sent))

    def arrived(self, sent: int) -> bool:
        return sent <= self.ended


@dataclass
class Pinned:
    """Batches that tell when nobody holds them any more."""

    gone: list[int] = field(default_factory=list)

    def batch(self, k: int) -> Batch:
        tensor = torch.full((2,), k)
        weakref.finalize(tensor, self.gone.append, k)
        return {"k": tensor}


def test_what_is_copied_from_is_held_until_its_event():
    way, pinned = FakeWay(), Pinned()
    copies = InFlightBatches(way)
    for k in (1, 2, 3):
        there = copies.take(k, pinned.batch(k))
        assert there["k"].tolist() == [k, k]
    gc.collect()
    assert pinned.gone == []
    way.ended = 2
    copies.take(4, pinned.batch(4))
    gc.collect()
    assert sorted(pinned.gone) == [1, 2]


@pytest.mark.extended
def test_what_was_forgotten_is_held_as_long():
    way, pinned = FakeWay(), Pinned()
    copies = InFlightBatches(way)
    copies.begin(1, pinned.batch(1))
    copies.forget()
    gc.collect()
    assert pinned.gone == []
    way.ended = 1
    copies.begin(2, pinned.batch(2))
    gc.collect()
    assert pinned.gone == [1]


def test_a_batch_is_copied_once_and_received_before_it_is_used():
    way = FakeWay()
    copies = InFlightBatches(way)
    batch = {"k": torch.ones(2)}
    copies.begin(8, batch)
    copies.begin(8, batch)
    assert way.told == [("sent", 1)]
    copies.take(8, batch)
    copies.take(16, batch)  # was not there in time
    assert way.told == [("sent", 1), ("received", 1), ("sent", 2), ("received", 2)]


def test_without_room_a_batch_waits_for_its_turn():
    way = FakeWay()
    way.room = 0
    copies = InFlightBatches(way)
    batch = {"k": torch.ones(2)}
    copies.begin(8, batch)
    assert way.told == []
    with pytest.raises(torch.OutOfMemoryError):
        copies.take(8, batch)
    way.room = 1
    assert copies.take(8, batch)["k"].tolist() == [1, 1]


def test_masks_stay_where_the_engine_looks_at_them():
    way = FakeWay()
    copies = InFlightBatches(way)
    masked = {key: torch.ones(2, 3) for key in ("input_ids", "labels", "attention_mask")}
    copies.begin(8, masked)
    assert copies.take(8, masked) is masked and way.told == []
    copies.take(16, {**masked, "pixels": torch.ones(2, 3)})
    assert way.told == [("sent", 1), ("received", 1)]
    assert set(PER_TOKEN_KEYS) == batch_split.PER_TOKEN


# -- in a loader -----------------------------------------------------------------------------------


def copying(source: Numbers, way: FakeWay) -> Loader:
    loader = Loader(source, [4], 0, prefetch=2)
    loader._copies = InFlightBatches(way)
    return loader


def until_there(loader: Loader) -> None:
    """The next batch, on the host."""
    position = loader.cursor.position
    with loader._feed._changed:
        assert loader._feed._changed.wait_for(lambda: loader._feed.is_ready(position), timeout=60)


def test_the_next_batch_is_on_its_way_while_one_is_computed():
    way = FakeWay()
    with copying(Numbers(40), way) as loader:
        expected = GlobalOrder(40, 0).span(0, 20).reshape(5, 4).tolist()
        found = [next(loader)["k"].tolist()]
        for step in range(1, 5):
            until_there(loader)
            loader._copy_ahead()  # as `next` does, where it finds the batch there
            before = len(way.told)
            found.append(next(loader)["k"].tolist())
            # Nothing was copied for this batch now: that had begun in the step before.
            assert way.told[before] == ("received", step + 1)
        assert found == expected


def test_batches_on_their_way_do_not_count():
    way = FakeWay()
    with copying(Numbers(40), way) as loader:
        assert "pinned memory" in loader.reasons[0][1]
        state = loader.state_dict()
        first = next(loader)["k"].tolist()
        until_there(loader)
        loader._copy_ahead()
        assert loader.cursor.position == 4
        loader.load_state_dict(state)
        assert next(loader)["k"].tolist() == first
        assert loader.last_indices.tolist() == first


def test_where_a_batch_cannot_be_copied_nothing_is_lost():
    way = FakeWay()
    with copying(Numbers(40), way) as loader:
        order = GlobalOrder(40, 0).span(0, 12).reshape(3, 4).tolist()
        assert next(loader)["k"].tolist() == order[0]
        way.room = 0
        loader._copies.forget()
        with pytest.raises(torch.OutOfMemoryError):
            next(loader)
        assert loader.cursor.position == 4 and loader.last_indices.tolist() == order[0]
        way.room = 10
        assert [next(loader)["k"].tolist() for _ in range(2)] == order[1:]


# -- on a GPU --------------------------------------------------------------------------------------


class Wide:
    """Sample k holds k, often: its copy takes a while."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((2**20,), float(k))}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_that_lags_behind_reads_what_it_was_given():
    """The host runs far ahead: memory of earlier batches must not get later ones."""
    sums = []
    with Loader(Wide(), [8], 0, device="cuda:0") as loader:
        for _ in range(20):
            batch = next(loader)
            assert batch["x"].device == torch.device("cuda", 0)
            torch.cuda._sleep(10_000_000)
            sums.append(batch["x"][:, :: 2**10].mean(1))
            del batch
        assert "pinned memory" in loader.reasons[0][1]
        found = [int(k) for mean in sums for k in mean.tolist()]
    assert found == GlobalOrder(64, 0).span(0, 160).tolist()


@pytest.mark.extended
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_does_not_wait_for_what_is_computed():
    way = CopyStream(torch.device("cuda", 0))
    batch = {"x": torch.ones(2**20).pin_memory()}
    way.send(batch)[1].synchronize()  # memory is there
    computed = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    computed.record()
    there, sent = way.send(batch)
    sent.synchronize()
    assert not computed.query()
    way.receive(there, sent)
    assert float(there["x"].sum()) == 2**20 and computed.query()
