"""How often a run copies its state into memory, by what that takes, and saves it on disk."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from gpumix.schema.job.job import DataSpec, Job, ModelSpec
from gpumix.train.state_keeper import (
    SAVE_EVERY_S,
    StateKeeper,
    choose_copy_interval,
    choose_save_interval,
)


@pytest.mark.parametrize(
    ("copied_s", "step_s", "every"),
    [
        (0.0, 0.1, 1),
        (0.0005, 0.1, 1),
        (0.0095, 0.1, 10),  # a tenth of a step, which is short
        (0.05, 1.1, 1),  # a twentieth of a long one
        (0.2, 2.0, 2),
        (0.0, 0.0, 1),
    ],
)
def test_the_longer_a_step_the_more_a_copy_may_take(copied_s, step_s, every):
    assert choose_copy_interval(copied_s, step_s) == every


@pytest.mark.parametrize("step_s", [0.01, 0.7, 30.0, 3600.0])
def test_what_is_on_disk_is_minutes_old(step_s):
    every = choose_save_interval(step_s)
    assert every * step_s >= SAVE_EVERY_S > (every - 1) * step_s


class Ranks:
    """Three ranks, of which one takes twice as long for a step."""

    def gather(self, what: str, own: str) -> list[str]:
        copies, saves = own.split()
        return [own, own, f"{copies} {int(saves) * 2}"]


def intervals(**saving) -> tuple[int, int]:
    """Steps between copies in memory, and between checkpoints, once both are chosen."""
    keeper = object.__new__(StateKeeper)
    job = Job(
        model=ModelSpec(factory="toys:model"),
        data=DataSpec(factory="toys:tokens"),
        sequence_length=8,
        global_batch_size=8,
        max_steps=10,
        **saving,
    )
    keeper._context = SimpleNamespace(job=job, ranks=Ranks())
    keeper._memory, keeper._copied_s, keeper._every_steps = None, deque([0.1]), 1
    keeper.save_every_steps = job.stated_save_steps
    keeper.choose_intervals(2.0)
    return keeper._every_steps, keeper.save_every_steps


def test_all_ranks_save_after_the_same_step():
    assert intervals() == (1, 2 * choose_save_interval(2.0))


def test_what_the_job_says_is_done():
    assert intervals(save_steps=0) == (1, 0)
    assert intervals(save_steps=7) == (1, 7)
