"""What of a host the data of one rank may take."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpumix.data.core import host_limits
from gpumix.data.core.host_limits import (
    BATCH_MEMORY_SHARE,
    MAX_BATCH_BYTES,
    batch_memory_bytes,
    get_rank_cores,
)
from gpumix.data.workers.fetch import Chunk, fetch_timed
from helpers.samples.sources import Numbers
from helpers.training.staging import rows, staged_plan

GIB = 2**30


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
def test_what_a_chunk_waits_for_a_core_is_no_part_of_its_cost():
    """Three others want the core on which it is fetched."""
    core = min(os.sched_getaffinity(0))
    here = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", here]) for _ in range(3)]
    costs = []

    def fetched() -> None:
        os.sched_setaffinity(0, [core])  # of this thread
        begun = time.perf_counter()
        costs.append(fetch_timed(Busy(4), Chunk(0, 0, np.arange(4), np.zeros(4)), "stop")[2])
        costs.append(time.perf_counter() - begun)

    thread = threading.Thread(target=fetched)
    thread.start()
    thread.join()
    for other in others:
        other.kill()
        other.wait()
    cost, by_the_clock_s = costs
    assert cost.cpu_s < 0.7 * by_the_clock_s
    assert cost.cpu_s <= cost.wall_s < cost.cpu_s + 0.2 * by_the_clock_s


def test_where_the_system_does_not_tell_nothing_is_taken_off(monkeypatch, tmp_path):
    for file in (tmp_path / "none", tmp_path / "empty"):
        monkeypatch.setattr(host_limits, "_SCHEDSTAT_FILE", str(file))
        assert host_limits.read_core_wait_s() == 0.0
        (tmp_path / "empty").write_text("")


class Busy(Numbers):
    """A sample takes 0.1 s of a core."""

    def rows(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        until_s = time.thread_time() + 0.1 * len(indices)
        while time.thread_time() < until_s:
            pass
        return super().rows(indices)


@pytest.fixture
def alone(monkeypatch):
    """Not one of torchrun's ranks."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_ranks_of_one_host_share_what_batches_ahead_may_take(monkeypatch, alone):
    monkeypatch.setattr(host_limits, "available_host_bytes", lambda: 20 * GIB)
    assert batch_memory_bytes([4, 4], 0) == int(20 * GIB * BATCH_MEMORY_SHARE)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert batch_memory_bytes([1] * 8, 0) == int(20 * GIB * BATCH_MEMORY_SHARE / 4)
    monkeypatch.setattr(host_limits, "available_host_bytes", lambda: 10**6 * GIB)
    assert batch_memory_bytes([1] * 8, 0) == MAX_BATCH_BYTES


def test_a_plan_says_who_shares_a_host(monkeypatch, alone):
    monkeypatch.setattr(host_limits, "available_host_bytes", lambda: 20 * GIB)
    plan = staged_plan("gpt2", rows([6, 2]), zero_stage=1)
    assert len({worker.host for worker in plan.workers}) == 1
    assert [batch_memory_bytes(plan, rank) for rank in (0, 1)] == [GIB, GIB]
    assert get_rank_cores(plan, 0) == 3 * get_rank_cores(plan, 1)


FAULTS = """
import resource
from gpumix.data.core.host_limits import keep_freed_memory
kept = keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def read():
    sample = bytes(2 * 2**20).replace(b"\\0", b"a")  # two pieces, and every page of them

read()
before = faults()
for _ in range(100):
    read()
print(kept, (faults() - before) / 100)
"""


def test_the_c_library_is_asked_to_keep_memory_unless_the_user_asked_it_otherwise(monkeypatch):
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *given: asked.append(given) or 1)
    monkeypatch.setattr(host_limits.ctypes, "CDLL", lambda name: library)
    for name in host_limits._MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    keep = host_limits.keep_freed_memory.__wrapped__  # once in a process
    assert keep()
    assert [value > 4 * 2**20 for _, value in asked] == [True, True]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep()
    assert len(asked) == 2


@pytest.mark.extended
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("said", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_what_samples_were_read_into_is_kept_unless_the_user_says_how_it_is_to_be(said):
    clean = {key: value for key, value in os.environ.items() if "MALLOC" not in key}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=clean | said, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    kept, faults = done.stdout.split()
    assert kept == str(not said)
    pages = 4 * 2**20 / resource.getpagesize()
    assert float(faults) < pages / 100 if kept == "True" else float(faults) > pages / 4
