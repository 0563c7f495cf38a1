"""A rank that has ended is known at once, whatever it leaves, and what it said last counts."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import InputError, RankLost
from gpumix.train.processes import local_launcher
from helpers.errors import raises

DEVICES = [Device(id=f"cpu-{n}", device_class="cpu", host="localhost") for n in range(2)]
FOREVER_S = 600.0


@pytest.fixture
def left(tmp_path) -> Iterator[Path]:
    """Where a process says its number that nobody else ends."""
    path = tmp_path / "left"
    yield path
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int(path.read_text()), signal.SIGKILL)


def _killed_with_a_child(seat, left) -> None:
    """As a rank whose dataset has a manager or a pool: what it forks has its pipe too."""
    if seat.rank == 1:
        context = multiprocessing.get_context("fork")
        child = context.Process(target=time.sleep, args=(FOREVER_S,), daemon=True)
        child.start()
        Path(left).write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked")
def test_a_killed_rank_is_named_though_a_process_that_it_forked_lives(left):
    with pytest.raises(RankLost) as caught:
        local_launcher.launch(_killed_with_a_child, DEVICES, left)
    os.kill(int(left.read_text()), 0)  # it is still there
    told = r"rank 1 \(device 'cpu-1', pid \d+\) was killed by signal 9 \(SIGKILL\)"
    assert re.fullmatch(told, caught.value.what)
    assert caught.value.device == "cpu-1"


def _says_and_ends(seat, fails: bool) -> str:
    if fails and seat.rank == 1:
        raise InputError("no such thing", code="no-such-thing")
    return f"said by {seat.rank}"


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_rank_says_last_counts_though_its_end_is_seen_first(monkeypatch, fails):
    seen = local_launcher.wait

    def only_ends(signs, timeout):
        return seen([sign for sign in signs if isinstance(sign, int)], timeout)

    monkeypatch.setattr(local_launcher, "wait", only_ends)
    if fails:
        with raises(InputError, code="no-such-thing"):
            local_launcher.launch(_says_and_ends, DEVICES, fails)
    else:
        assert local_launcher.launch(_says_and_ends, DEVICES, fails) == ["said by 0", "said by 1"]


def _says_much(seat, size: int) -> bytes:
    return bytes(size)


def test_what_fills_the_pipe_is_read_to_its_end():
    size = 1 << 22
    assert local_launcher.launch(_says_much, DEVICES, size) == [bytes(size)] * 2
