"""Whatever happens to a run, every sample is used once per epoch, in the one order.

A random life: steps, re-plans, planned resumes on other numbers of ranks, and crashes that fall
back to the last checkpoint. The samples of the steps that count must be the global order itself.
"""

from __future__ import annotations

import itertools
import threading

import numpy as np
import torch
from data_helpers import Numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumix.data.arena import Arena
from gpumix.data.loader import Loader
from gpumix.data.order import GlobalOrder


@st.composite
def shares(draw: st.DrawFn, total: int, ranks: int | None = None) -> list[int]:
    """A cut of `total` over `ranks`, or else over one to eight, zeros included."""
    low, high = (0, 7) if ranks is None else (ranks - 1, ranks - 1)
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=low, max_size=high)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


class Cluster:
    """All ranks of a run in one process, each with a loader of its own."""

    def __init__(self, n: int, seed: int, cut: list[int], prefetches: list[int]) -> None:
        self.loaders = [
            Loader(Numbers(n), cut, rank, seed=seed, prefetch=prefetches[rank])
            for rank in range(len(cut))
        ]

    def step(self) -> list[int]:
        return [int(k) for loader in self.loaders for k in next(loader)["k"]]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 60), batch=st.integers(1, 24), seed=st.integers(0, 2**64))
def test_no_sample_is_lost_or_repeated(data, n, batch, seed):
    prefetches = data.draw(st.lists(st.integers(1, 9), min_size=8, max_size=8))
    cluster = Cluster(n, seed, data.draw(shares(batch)), prefetches)
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
        cluster = Cluster(n, seed, data.draw(shares(batch)), prefetches)
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
    with Loader(Numbers(100), [8], 0, workers=1, kind="processes", prefetch=2) as loader:
        next(loader)
        assert lent.wait(30)
        loader.replan([8])
        forgotten.set()
        found = [next(loader)["k"].tolist() for _ in range(6)]
        assert found == [loader.indices(step).tolist() for step in range(1, 7)]
        arena = loader._feed._arena
        assert arena is not None
        assert len(set(arena._free)) == len(arena._free)
