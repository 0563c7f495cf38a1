"""Whatever happens to a run, every sample is used once per epoch, in the one order.

A random life: steps, re-plans, planned resumes on other numbers of ranks, and crashes that fall
back to the last checkpoint. The samples of the steps that count must be the global order itself.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumix.data.loader import Loader
from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.workers import prefetcher
from gpumix.data.workers.autotune import MEASURED_STEPS
from gpumix.data.workers.shared_memory import Arena
from gpumix.data.workers.worker_pool import ProcessWorkerPool
from gpumix.schema.errors import TrainingError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.waiting import wait_until
from helpers.samples.sources import Numbers


@st.composite
def shares(draw: st.DrawFn, total: int, ranks: int | None = None) -> list[int]:
    """A cut of `total` over `ranks`, or else over one to eight, zeros included."""
    low, high = (0, 7) if ranks is None else (ranks - 1, ranks - 1)
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=low, max_size=high)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


FORKED: dict[str, Any] = {"num_workers": 2, "kind": "processes"}


class Cluster:
    """All ranks of a run in one process, each with a loader of its own.

    Args:
        forked: the rank whose workers are processes, if one's are.
    """

    def __init__(
        self, n: int, seed: int, cut: list[int], prefetches: list[int], forked: int | None
    ) -> None:
        self.loaders = []
        for rank in range(len(cut)):
            given = FORKED if rank == forked else {}
            made = Loader(Numbers(n), cut, rank, seed=seed, prefetch=prefetches[rank], **given)
            self.loaders.append(made)

    def step(self) -> list[int]:
        return [int(k) for loader in self.loaders for k in next(loader)["k"]]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


LIVES = {"n": st.integers(1, 60), "batch": st.integers(1, 24), "seed": st.integers(0, 2**64)}


@settings(max_examples=8, deadline=None)
@given(data=st.data(), **LIVES)
def test_no_sample_is_lost_or_repeated(data, n, batch, seed):
    live(data, n, batch, seed)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
@settings(max_examples=2, deadline=None)
@given(data=st.data(), **LIVES)
def test_no_sample_is_lost_or_repeated_by_processes(data, n, batch, seed):
    """Of the rank between two others."""
    live(data, n, batch, seed, ranks=3, forked=1)


def live(
    data: st.DataObject,
    n: int,
    batch: int,
    seed: int,
    *,
    ranks: int | None = None,
    forked: int | None = None,
) -> None:
    prefetches = data.draw(st.lists(st.integers(1, 9), min_size=8, max_size=8))
    cluster = Cluster(n, seed, data.draw(shares(batch, ranks)), prefetches, forked)
    used: list[list[int]] = []
    saved, saved_steps = cluster.loaders[0].state_dict(), 0
    for event in data.draw(
        st.lists(st.sampled_from(["step", "step", "replan", "resume", "crash"]))
    ):
        if event == "step":
            used.append(cluster.step())
            continue
        if event == "replan":
            cut = data.draw(shares(batch, len(cluster.loaders)))
            for loader in cluster.loaders:
                loader.replan(cut)
            continue
        if event == "resume":
            any_rank = data.draw(st.sampled_from(cluster.loaders))
            saved, saved_steps = any_rank.state_dict(), len(used)
        cluster.close()
        cluster = Cluster(n, seed, data.draw(shares(batch, ranks)), prefetches, forked)
        for loader in cluster.loaders:
            loader.load_state_dict(saved)
        del used[saved_steps:]
    used.append(cluster.step())
    cluster.close()
    reference = GlobalOrder(n, seed).span(0, len(used) * batch)
    assert np.array_equal(np.concatenate(used), reference)
    epochs = len(reference) // n
    assert all(sorted(reference[e * n : (e + 1) * n]) == list(range(n)) for e in range(epochs))


@given(data=st.data(), n=st.integers(1, 10**9), batch=st.integers(1, 500), step=st.integers(0, 99))
def test_any_cut_of_a_batch_is_the_batch(data, n, batch, step):
    cut = data.draw(shares(batch))
    order = GlobalOrder(n, 1)
    loaders = [Loader(Numbers(n), cut, rank, seed=1) for rank in range(len(cut))]
    parts = [loader.indices(step) for loader in loaders]
    assert [len(part) for part in parts] == cut
    assert np.array_equal(np.concatenate(parts), order.span(step * batch, (step + 1) * batch))


def test_a_batch_that_is_forgotten_while_it_is_put_together_gives_its_memory_back_once(monkeypatch):
    """Else two batches would lie in the same memory later."""
    lent, forgotten, times = threading.Event(), threading.Event(), itertools.count()
    lend = Arena.lend

    def slowly(arena: Arena, slot: int, nbytes: int) -> torch.Tensor:
        found = lend(arena, slot, nbytes)
        if next(times) == 1:
            lent.set()
            assert forgotten.wait(30)
        return found

    monkeypatch.setattr(Arena, "lend", slowly)
    with Loader(Numbers(100), [8], 0, num_workers=1, kind="processes", prefetch=2) as loader:
        next(loader)
        assert lent.wait(30)
        loader.load_state_dict(loader.state_dict())
        forgotten.set()
        found = [next(loader)["k"].tolist() for _ in range(6)]
        assert found == [loader.indices(step).tolist() for step in range(1, 7)]
        arena = loader._feed._arena
        assert arena is not None
        assert len(set(arena._free)) == len(arena._free)


class Logged:
    """Tells which samples were read, by whatever process."""

    def __init__(self, log: Path, n: int = 10_000) -> None:
        self.log, self.n = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY), n
        self.path = log

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> dict[str, Any]:
        os.write(self.log, f"{k}\n".encode())
        time.sleep(1e-3)
        return {"k": k, "square": torch.full((3,), float(k * k))}

    def read(self) -> Counter[int]:
        return Counter(map(int, self.path.read_text().split()))


OWN = [4, 4, 9, 20, 24, 24, 11, 5, 0]  # rows that go do not come back


READ = [("processes", 1), ("threads", 0), ("processes", 0), ("threads", 1)]


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
@pytest.mark.parametrize(("kind", "rank"), left_out(READ, READ[2:]))
def test_a_replan_keeps_workers_and_what_they_fetched(tmp_path, kind, rank):
    dataset = Logged(tmp_path / "log")
    order, wanted = GlobalOrder(len(dataset), 0), {0}  # the first tells what all are like
    with Loader(dataset, cut(OWN[0], rank), rank, num_workers=2, kind=kind, prefetch=4) as loader:
        next(loader)
        crew = loader._feed._crew
        assert crew is not None
        workers = crew.pids if isinstance(crew, ProcessWorkerPool) else []
        for step, samples in enumerate(OWN[1:], start=1):
            begin = 24 * step + (24 - samples if rank else 0)
            loader.replan(cut(samples, rank))
            batch = next(loader)
            own = order.span(begin, begin + samples).tolist()
            assert batch["k"].tolist() == own == loader.last_indices.tolist()
            assert torch.equal(batch["square"][:, 0], batch["k"].float() ** 2)
            assert loader._feed._crew is crew and loader.setting.kind == kind
            assert workers == (crew.pids if isinstance(crew, ProcessWorkerPool) else [])
            wanted |= set(own)
    counts = dataset.read()
    assert wanted <= counts.keys()
    assert {k for k, count in counts.items() if count > 1} <= {0}


def cut(own: int, rank: int) -> list[int]:
    """Of 24 samples."""
    return [24 - own, own] if rank else [own, 24 - own]


class Held(Numbers):
    """Only the first batch is read at once: others wait until they may."""

    def __init__(self) -> None:
        super().__init__(100)
        self.may = threading.Event()

    def rows(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        if any(self.asked) and len(indices):
            assert self.may.wait(30)
        return super().rows(indices)


def test_what_cannot_be_read_is_told_to_the_batch_that_took_over_in_the_end():
    dataset = Held()
    with Loader(dataset, [8, 0], 0, num_workers=1, kind="threads", prefetch=2) as loader:
        next(loader)
        loader.replan([7, 1])
        loader.replan([6, 2])
        dataset.broken = set(range(100))
        dataset.may.set()
        wait_until(lambda: loader._feed.is_ready(8), 20, told=lambda: "it waits for ever")
        with raises(TrainingError, code="sample-unreadable", what="the disk is gone"):
            next(loader)


def test_a_batch_that_is_dropped_waits_for_no_rows_of_the_one_before():
    """Else its memory would never be given back."""
    dataset = Held()
    with Loader(dataset, [4, 4], 0, num_workers=2, kind="threads", prefetch=1) as loader:
        next(loader)
        loader.replan([6, 2])
        loader.load_state_dict(loader.state_dict())
        dataset.may.set()
        wait_until(lambda: not loader._feed._by_number, 20)


def test_a_replan_keeps_what_is_known_of_samples(tmp_path):
    """And what they take of the device is measured anew."""
    with Loader(Logged(tmp_path / "log"), [12, 12], 0, num_workers=2, prefetch=3) as loader:
        next(loader)
        known = loader._tuner._solo
        assert known is not None
        loader.replan([18, 6])
        assert loader._tuner._solo == known and not loader._tuner._jumped
        for _ in range(MEASURED_STEPS + 1):
            next(loader)
        assert loader._tuner._jumped and loader._tuner._rows == 18


def test_batches_that_outgrow_the_memory_that_is_shared_come_in_a_larger_one(monkeypatch):
    monkeypatch.setattr(prefetcher, "UNKNOWN_BYTES", 1)
    with Loader(Numbers(10_000), [4, 508], 0, num_workers=2, kind="processes") as loader:
        loader._feed.want(0, lambda: loader.course.part(0))
        arena = loader._feed._arena
        assert arena is not None and arena.slot_bytes < 508 * 16
        found = [next(loader)["k"].tolist()]
        loader.replan([508, 4])
        found += [next(loader)["k"].tolist() for _ in range(3)]
        assert loader._feed._arena is not arena
    order = GlobalOrder(10_000, 0)
    assert found[0] == order.span(0, 4).tolist()
    assert found[1:] == [order.span(512 * s, 512 * s + 508).tolist() for s in (1, 2, 3)]
