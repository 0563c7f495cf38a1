"""One rank's loader: its rows, its state, its thread, and the batches of an evaluation."""

from __future__ import annotations

import gc
import math
import sys
import threading

import pytest
import torch

from gpumix.data.loader import Loader, evaluation_batches
from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.workers.autotune import Limit
from gpumix.schema.errors import InputError, TrainingError
from helpers.errors import raises
from helpers.extended import every_second
from helpers.processes import commands
from helpers.processes.waiting import wait_until
from helpers.samples.sources import Numbers


def take(loader: Loader, steps: int) -> list[int]:
    return [int(k) for _ in range(steps) for k in next(loader)["k"]]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gpumix-loader")]


def test_batches_follow_the_global_order_across_epochs():
    with Loader(Numbers(7), [4, 1], 1, seed=5) as loader:
        expected = GlobalOrder(7, 5).span(0, 50).reshape(10, 5)[:, 4]
        assert take(loader, 10) == expected.tolist()


def test_last_indices_tell_what_a_batch_holds():
    with Loader(Numbers(100), [3, 5], 1) as loader:
        for step in range(4):
            batch = next(loader)
            assert loader.last_indices.tolist() == batch["k"].tolist()
            assert loader.last_indices.tolist() == loader.indices(step).tolist()


def test_a_share_of_zero_gives_tensors_of_no_rows():
    with Loader(Numbers(10), [4, 0], 1) as loader:
        batch = next(loader)
    assert batch["k"].shape == (0,) and batch["k"].dtype == torch.int64
    assert batch["pair"].shape == (0, 2)
    assert loader.last_indices.shape == (0,)
    assert loader.cursor.position == 4


def test_any_map_style_dataset_will_do():
    with Loader([{"x": torch.tensor([float(k)])} for k in range(6)], [2], 0) as loader:
        assert next(loader)["x"].shape == (2, 1)


def test_what_is_fetched_ahead_does_not_count():
    source = Numbers(100)
    with Loader(source, [4], 0, prefetch=3) as loader:
        assert loader.state_dict()["position"] == 0
        next(loader)
        wait_until(lambda: all(map(loader._feed.is_ready, (4, 8, 12))))
        assert sum(map(bool, source.asked)) == 4  # one returned, three ahead, never more
        assert loader.state_dict()["position"] == 4


def test_a_state_goes_on_where_it_was_with_other_ranks():
    with Loader(Numbers(50), [4, 4], 0, seed=1) as first:
        take(first, 3)
        state = first.state_dict()
        rest = GlobalOrder(50, 1).span(24, 40).tolist()
    with Loader(Numbers(50), [8], 0, seed=1) as other:
        take(other, 1)
        other.load_state_dict(state)
        assert take(other, 2) == rest


@pytest.mark.parametrize(
    ("source", "seed", "says"),
    [
        (Numbers(51), 1, "n is 50 in the checkpoint and 51 here"),
        (Numbers(50), 2, "seed is 1 in the checkpoint and 2 here"),
        (Numbers(50, "other"), 1, "fingerprint is 'numbers' in the checkpoint and 'other' here"),
    ],
)
def test_a_foreign_state_is_refused_and_nothing_moves(source, seed, says):
    with Loader(Numbers(50), [4], 0, seed=1) as first, Loader(source, [4], 0, seed=seed) as loader:
        next(loader)
        with pytest.raises(InputError) as caught:
            loader.load_state_dict(first.state_dict())
        assert caught.value.why == says
        assert loader.cursor.position == 4


def test_a_replan_holds_from_the_next_batch():
    with Loader(Numbers(100), [4, 2], 1, seed=2) as loader:
        order = GlobalOrder(100, 2)
        assert take(loader, 1) == order.span(4, 6).tolist()
        loader.replan([1, 5])
        assert take(loader, 2) == [*order.span(7, 12), *order.span(13, 18)]
        loader.replan([2, 2, 2])
        assert take(loader, 1) == order.span(20, 22).tolist()


@pytest.mark.parametrize("shares", [[4, 3], [6], [7, -1]])
def test_an_unfit_replan_is_refused_and_changes_nothing(shares):
    with Loader(Numbers(100), [4, 2], 1, seed=2) as loader:
        with pytest.raises(InputError):
            loader.replan(shares)
        assert take(loader, 1) == GlobalOrder(100, 2).span(4, 6).tolist()


def test_an_error_in_the_thread_is_raised_in_its_turn_and_loses_nothing():
    source = Numbers(40)
    order = GlobalOrder(40, 0).span(0, 40).tolist()
    source.broken = {order[9]}  # in the third batch of four
    with Loader(source, [4], 0) as loader:
        assert take(loader, 2) == order[:8]
        for _ in range(2):
            with raises(TrainingError, code="sample-unreadable", what="the disk is gone") as caught:
                next(loader)
            assert f"sample {order[9]} of" in caught.value.what
            assert "sources.py" in caught.value.where and "in rows" in caught.value.where
            assert loader.cursor.position == 8
        source.broken = set()
        assert take(loader, 2) == order[8:16]


def test_the_thread_ends_with_the_loader():
    with Loader(Numbers(40), [4], 0) as loader:
        assert threads() == []  # nothing runs before the first batch
        next(loader)
        assert len(threads()) == 1
    assert threads() == []


def test_the_thread_ends_when_the_loader_is_dropped():
    loader = Loader(Numbers(40), [4], 0)
    next(loader)
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("gpumix-loader"))
    del loader
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


FORGETFUL = """
from gpumix.data.loader import Loader
loader = Loader([{"x": k} for k in range(10)], [2], 0)
print(next(loader)["x"].shape[0])
"""


@pytest.mark.parametrize("fresh", every_second([False, True]))
def test_a_loader_that_nobody_closes_does_not_keep_the_interpreter(fresh, tmp_path):
    (tmp_path / "script.py").write_text(FORGETFUL)
    command = [sys.executable, tmp_path / "script.py"]
    env = commands.environment(tmp_path / "cache")
    done = commands.run(command, folder=tmp_path, env=env, timeout_s=120, fresh=fresh)
    assert (done.out, done.err, done.code) == ("2\n", "", 0)


def test_a_loader_says_what_holds_it_back():
    with Loader(Numbers(40), [4], 0) as loader:
        assert loader.limit is Limit.UNKNOWN
        take(loader, 1)
        loader._tuner.limit = Limit.CORES
        assert loader.limit is Limit.CORES


@pytest.mark.parametrize(
    ("key", "value"),
    [("prefetch", 0), ("num_workers", -1), ("num_workers", 2000), ("timeout_s", math.nan)],
)
def test_settings_that_cannot_be_are_refused(key, value):
    code = f"{key.removesuffix('_s').replace('_', '-')}-invalid"
    with raises(InputError, code=code, what=key):
        Loader(Numbers(4), [1], 0, **{key: value})


def test_a_loader_may_wait_without_end():
    with Loader(Numbers(40), [4], 0, kind="threads", timeout_s=math.inf) as loader:
        assert take(loader, 2) == GlobalOrder(40, 0).span(0, 8).tolist()


def test_host_batches_are_not_pinned():
    with Loader(Numbers(4), [1], 0, device="cpu") as loader:
        assert not next(loader)["k"].is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_of_an_evaluation_on_a_gpu_are_pinned():
    ((batch, _),) = evaluation_batches(Numbers(2), [2], 0, batches=1, device="cuda")
    assert all(value.is_pinned() for value in batch.values())


def evaluated(n: int, shares: list[int], batches: int) -> list[list[int]]:
    """Per batch, the samples of all ranks in rank order."""
    ranks = [
        list(evaluation_batches(Numbers(n), shares, rank, batches=batches))
        for rank in range(len(shares))
    ]
    return [
        [int(k) for batch, _ in step for k in batch["k"]]
        for step in zip(*ranks, strict=True)  # every rank has the same number of batches
    ]


@pytest.mark.parametrize(("n", "batches", "count"), [(20, 3, 3), (20, 9, 5), (23, 9, 5), (4, 9, 1)])
def test_an_evaluation_reads_in_file_order_and_never_wraps(n, batches, count):
    seen = evaluated(n, [3, 0, 1], batches)
    assert seen == [list(range(4 * k, 4 * k + 4)) for k in range(count)]


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_too_few_samples_give_one_short_batch(n):
    assert evaluated(n, [5, 0, 2, 1], 4) == [list(range(n))]


def test_an_evaluation_needs_held_out_samples():
    with raises(InputError, code="no-held-out-samples"):
        evaluation_batches(Numbers(0), [2], 0, batches=1)


def test_an_error_that_goes_away_costs_no_sample():
    source = Numbers(100)
    source.broken = set(range(100))
    expected = GlobalOrder(100, 3).span(0, 20)
    with Loader(source, [4], 0, seed=3) as loader:
        with raises(TrainingError, code="sample-unreadable", what="the disk is gone"):
            next(loader)
        source.broken = set()
        assert take(loader, 5) == expected.tolist()
