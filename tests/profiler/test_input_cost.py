"""What many readers get of data that waits: of a disk that serves one after the other, no more."""

from __future__ import annotations

import multiprocessing
import time
from itertools import product

import pytest
import torch

from gpumix.data.core.read_policy import Reading
from gpumix.data.sources.map_style import SampleSource
from gpumix.data.workers.fetch import Cost
from gpumix.engine.rank_group import RankGroup
from gpumix.profiler import input_pipeline
from gpumix.profiler.input_pipeline import (
    compute_max_rate,
    measure_input,
    most_samples_per_s,
    read_at_once,
)
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from helpers.extended import left_out

ANSWER_S = 0.004
READERS, SIZE = 4, 2


class Disk:
    """Answers after a while, to one reader at a time, of whatever process."""

    def __init__(self, *, thread_safe: bool) -> None:
        self.thread_safe = thread_safe
        self._lock = multiprocessing.Lock()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        with self._lock:
            time.sleep(ANSWER_S)
        return {"input_ids": torch.full((4,), index)}


@pytest.mark.parametrize("thread_safe", [True, False])
def test_all_readers_together_get_no_more_than_the_disk_gives(monkeypatch, thread_safe):
    """However many they are, and though each chunk began before it was counted. Nobody is ended
    with the disk's lock in hand: it can be read again."""
    monkeypatch.setattr(input_pipeline, "LONGEST_S", 0.2)
    source = SampleSource(Disk(thread_safe=thread_safe), "data")
    for readers in (1, READERS, READERS):
        found = read_at_once(source, Reading(), readers, SIZE)
        under_way = readers * SIZE  # when counting began
        assert 0 < (found.samples - under_way) * ANSWER_S <= found.wall_s
        assert found.cpu_s < found.wall_s


class Ready:
    """Samples that take next to nothing to read."""

    def __init__(self, *, thread_safe: bool) -> None:
        self.thread_safe = thread_safe

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((4,), index)}


BEARS = list(product([True, False], repeat=2))


@pytest.mark.parametrize(("thread_safe", "forks"), left_out(BEARS, [BEARS[0], BEARS[2]]))
def test_one_reads_where_there_are_threads_only_and_samples_bear_one(
    monkeypatch, thread_safe, forks
):
    monkeypatch.setattr(input_pipeline, "can_fork", lambda: forks)
    monkeypatch.setattr(input_pipeline, "READERS", (1, 2))  # where this machine is busy
    device = Device(id="cpu-0", device_class="cpu", host="here", ordinal=0)
    kind = DeviceClass(name="cpu", accelerator="cpu", memory_bytes=2**30)
    (found,) = measure_input(
        SampleSource(Ready(thread_safe=thread_safe), "data"),
        Cluster(classes=(kind,), devices=(device,)),
        [device],
        RankGroup(None, rank=0, world=1, device=torch.device("cpu"), timeout_s=10),
        reading=Reading(),
    )
    assert found.parallel == (forks or thread_safe)


def got(per_s: float, busy: float = 0.0) -> Cost:
    """In two seconds, in which so many cores were busy."""
    return Cost(round(2 * per_s), 2.0, 2.0 * busy)


@pytest.mark.parametrize(
    ("few", "many", "cores", "most"),
    [
        (got(250), got(250), 8, 250.0),  # a disk that gives no more
        (got(250), got(350), 8, 350.0),
        (got(250), got(1000), 8, None),  # a network that answers all at once
        (got(250), got(400), 8, None),
        (got(250, 0.9), got(250, 0.9), 1, None),  # threads that wait for the interpreter
        (got(250, 0.9), got(250, 0.9), 8, 250.0),
        (got(250, 4.0), got(300, 7.9), 8, None),  # processes that wait for cores
    ],
)
def test_what_holds_readers_back(few, many, cores, most):
    assert compute_max_rate(few, many, cores) == most


def test_what_computes_is_not_looked_at():
    class Unread:
        thread_safe = True

    alone = Cost(100, wall_s=1.0, cpu_s=0.9)
    assert most_samples_per_s(Unread(), Reading(), alone, 4.0) is None
