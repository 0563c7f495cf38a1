"""A loader finds while it runs that its data takes longer now, and has more workers for it."""

from __future__ import annotations

import sys
import time

import pytest

from gpumix.data.loader import Loader
from helpers.samples.squares import Squares, expected

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")

STEP_S = 0.01
READ_S = 0.02  # of each of eight samples, later on


@pytest.mark.extended
def test_where_samples_take_longer_later_more_workers_make_up_for_it(tmp_path):
    slow = tmp_path / "slow"

    def read(k: int) -> None:
        if slow.exists():
            time.sleep(READ_S)

    found: list[int] = []
    with Loader(Squares(read=read), [8], 0) as loader:

        def take(steps: int) -> None:
            for _ in range(steps):
                found.extend(next(loader)["k"].tolist())
                time.sleep(STEP_S)

        take(40)
        before = loader.setting
        slow.touch()
        take(before.ahead + 150)
        assert loader.setting.workers > before.workers
    assert found == expected(len(found) // 8, stop=8)
