"""What many readers get of data that waits: of a disk that serves one after the other, no more."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch

from gpumix.data.reading import Reading
from gpumix.data.samples import SampleSource
from gpumix.train.input_cost import cost_alone, most_samples_per_s

ANSWER_S = 0.004
MANY_CORES = 1000.0  # none of what is read here takes one


class Waiting:
    """Samples that come after a while.

    Args:
        one_by_one: the disk answers one reader at a time, of whatever process.
    """

    def __init__(self, *, thread_safe: bool, one_by_one: bool) -> None:
        self.thread_safe = thread_safe
        self._lock = multiprocessing.Lock() if one_by_one else None

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self._lock is None:
            time.sleep(ANSWER_S)
        else:
            with self._lock:
                time.sleep(ANSWER_S)
        return {"input_ids": torch.full((4,), index)}


class Computing(Waiting):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        until_s = time.thread_time() + ANSWER_S
        while time.thread_time() < until_s:
            pass
        return {"input_ids": torch.full((4,), index)}


def most(dataset: Waiting) -> float | None:
    source, reading = SampleSource(dataset, "data"), Reading()
    return most_samples_per_s(source, reading, cost_alone(source, reading), MANY_CORES)


@pytest.mark.parametrize("thread_safe", [True, False])
def test_a_disk_that_serves_one_after_the_other(thread_safe):
    """No more than it answers: sleep never ends early, but chunks may end together."""
    found = most(Waiting(thread_safe=thread_safe, one_by_one=True))
    assert found is not None and 0 < found <= 1.25 / ANSWER_S


@pytest.mark.parametrize("thread_safe", [True, False])
def test_a_network_that_answers_all_at_once(thread_safe):
    """Sixteen readers get at least half as much again as four."""
    assert most(Waiting(thread_safe=thread_safe, one_by_one=False)) is None


def test_what_computes_is_held_back_by_cores():
    assert most(Computing(thread_safe=True, one_by_one=False)) is None
