"""A loader finds while it runs that its data takes longer now, and has more workers for it."""

from __future__ import annotations

import sys
import time
from statistics import median

import pytest
from squares import Squares, expected

from gpumix.data.loader import Loader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")

STEP_S = 0.01
READ_S = 0.02  # of each of eight samples, later on


def test_where_samples_take_longer_later_more_workers_make_up_for_it(tmp_path):
    slow = tmp_path / "slow"

    def read(k: int) -> None:
        if slow.exists():
            time.sleep(READ_S)

    found: list[int] = []
    with Loader(Squares(read=read), [8], 0) as loader:

        def steps_s(count: int) -> list[float]:
            taken = []
            for _ in range(count):
                begun = time.perf_counter()
                found.extend(next(loader)["k"].tolist())
                time.sleep(STEP_S)
                taken.append(time.perf_counter() - begun)
            return taken

        steps_s(40)
        before = loader.setting
        slow.touch()
        at_first_s = steps_s(before.ahead + 8)[before.ahead + 2 :]
        steps_s(150)
        assert loader.setting.workers > before.workers
        assert median(steps_s(30)) < 0.7 * median(at_first_s)
    assert found == expected(len(found) // 8, stop=8)
