"""Which numbers of workers are tried, by what a loader showed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumix.data.workers.autotune import Limit
from gpumix.doctor.function.loader_suspects import suspect_loaders
from gpumix.doctor.function.observations import LoaderObservation, Observations

# Ten steps of a tenth of a second, of 16 samples each; of which it waits half, and computes.
PLACE = "train.py:5"
LOADER = LoaderObservation(
    place=PLACE,
    workers=0,
    batch_size=16,
    persistent=False,
    streams=False,
    waited_s=0.5,
    cpu_s=0.5,
    begun=0,
    samples=160,
)
SEEN = Observations(steps=10, seconds=1.0, losses=(1.0,), threads=4, cores=4.0)
WORKING = {"workers": 2, "persistent": True}


def seen(cores: float = 4.0, cuda: bool = True, **changes: Any) -> Observations:
    loaders = (replace(LOADER, **changes),)
    return replace(SEEN, loaders=loaders, cuda=cuda, cores=cores, threads=int(cores))


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({}, 2),  # 0.05 s a batch, every 0.05 s, and some to spare
        (WORKING, 4),  # as much again is wanted of them
        (WORKING | {"workers": 1, "waited_s": 0.87}, 8),
        (WORKING | {"workers": 4, "waited_s": 0.9}, 16),  # as many as four cores are given at most
        ({"streams": True}, 1),  # one more would read all of the stream again
    ],
)
def test_too_few_workers(changes, workers):
    (found,) = suspect_loaders(seen(**changes))
    assert (
        (found.name == "workers" and "50%" in found.why) or "8" in found.why or "90%" in found.why
    )
    assert found.changes == {"num_workers": {PLACE: workers}} and found.alternatives == ()
    assert (
        found.fix == f"DataLoader(..., num_workers={workers}, persistent_workers=True) at {PLACE}"
    )


@pytest.mark.parametrize(
    "changes",
    [
        WORKING | {"streams": True, "workers": 1},  # each would read all of a stream
        {"tunes": True, "batch_size": None, "limit": Limit.CORES},
        {"waited_s": 0.01},
        WORKING | {"waited_s": 0.01, "workers": 4},  # as many as cores
        {"workers": 2, "waited_s": 0.01, "begun": 1},  # of a long epoch
    ],
)
def test_what_is_right(changes):
    assert list(suspect_loaders(seen(**changes))) == []
    assert list(suspect_loaders(seen(cuda=False, **changes))) == []


def tried(observed: Observations) -> list[tuple[int, int | None]]:
    """Workers and threads of all changes."""
    (found,) = suspect_loaders(observed)
    both = (found, *found.alternatives)
    assert all(one.name == "workers" and one.what == found.what for one in both)
    for one in both:
        threads = one.changes.get("threads")
        assert one.fix.endswith(f"; torch.set_num_threads({threads})") == (threads is not None)
    return [(one.changes["num_workers"][PLACE], one.changes.get("threads")) for one in both]


def test_without_a_gpu_workers_and_threads_share_the_cores():
    assert tried(seen(2.0, cuda=False)) == [(2, None), (2, 1), (1, 1)]
    assert tried(seen(16.0, cuda=False, **WORKING)) == [(4, None), (4, 12), (2, 14), (8, 8)]
    assert tried(seen(2.0, cuda=False, streams=True)) == [(1, None), (1, 1)]


def test_workers_that_only_wait_need_no_cores():
    assert tried(seen(2.0, cuda=False, cpu_s=0.01)) == [(2, None)]


def test_threads_are_not_raised():
    (found,) = suspect_loaders(replace(seen(2.0, cuda=False), threads=1))
    assert found.alternatives == ()


def test_more_workers_than_cores():
    many = WORKING | {"workers": 8, "waited_s": 0.01}
    (found,) = suspect_loaders(seen(2.0, **many))
    assert (found.what, found.why) == (
        "there are more workers than cores",
        "8 workers share 2 cores with training",
    )
    assert tried(seen(2.0, **many)) == [(2, None), (0, None)]
    assert tried(seen(2.0, cuda=False, **many)) == [(2, None), (0, None), (2, 1), (1, 1)]
    waits = many | {"workers": 3, "waited_s": 0.5}  # more of them, or fewer
    assert tried(seen(2.0, cuda=False, **waits)) == [(6, None), (2, None), (2, 1), (1, 1)]


def test_workers_that_are_started_anew():
    """They are waited for, or epochs are short; none may do."""
    anew = {"workers": 2, "begun": 1}
    (found,) = suspect_loaders(seen(**anew))
    assert found.what == "workers are started anew in each epoch"
    assert found.why == "1 epoch began in 10 steps"
    assert "num_workers=2, persistent_workers=True" in found.fix
    assert found.alternatives[0].fix == f"DataLoader(..., num_workers=0) at {PLACE}"
    short = anew | {"begun": 2, "waited_s": 0.01}
    assert tried(seen(2.0, cuda=False, **short)) == [(2, None), (0, None), (2, 1), (1, 1)]


def test_two_loaders_are_to_keep_up_with_what_is_computed_beside_them():
    one = replace(LOADER, workers=1, persistent=True, waited_s=0.38)
    both = replace(SEEN, loaders=(one, replace(one, place="train.py:6")))
    (found,) = suspect_loaders(replace(both, cuda=True))
    assert found.changes == {"num_workers": {PLACE: 5, "train.py:6": 5}}
    (found,) = suspect_loaders(both)
    shared = [dict(one.changes["num_workers"]) for one in found.alternatives]
    assert shared == [{PLACE: 2, "train.py:6": 2}, {PLACE: 1, "train.py:6": 1}]
    assert [one.changes["threads"] for one in found.alternatives] == [1, 2]
