"""Workers that are stuck: another one has their place, and reads their samples."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from gpumix.schema.errors import TrainingError
from helpers.errors import raises
from helpers.processes.waiting import wait_until
from helpers.samples.squares import Squares, alive, expected, pids, processes, take

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")


@pytest.mark.extended
def test_a_worker_that_is_stuck_is_replaced_and_a_sample_that_sticks_is_named():
    bad = expected(6)[-1]

    def read(k: int) -> None:
        if k == bad:
            time.sleep(1000)

    with processes(Squares(read=read), timeout_s=1.0) as loader:
        assert take(loader, 5) == expected(5)
        with raises(TrainingError, code="data-worker-lost", what=(bad, "1")):
            take(loader, 1)


def test_a_sample_that_sticks_once_is_read_by_another_worker(caplog, tmp_path):
    bad, once = expected(6)[-1], tmp_path / "once"

    def read(k: int) -> None:
        if k == bad and not once.exists():
            once.write_text(str(os.getpid()))
            time.sleep(1000)

    with processes(Squares(read=read), timeout_s=3.0) as loader:
        assert take(loader, 10) == expected(10)
        assert loader.lost_workers == 1
        stuck = int(once.read_text())
        assert len(pids(loader)) == 2 and stuck not in pids(loader)
        wait_until(lambda: not alive(stuck))
    (told,) = caplog.records
    assert told.getMessage() == (
        f"worker {stuck} of the data was lost at sample {bad} of Squares, another has its place: "
        "it was at it for more than 3 s"
    )


@pytest.mark.extended
def test_the_samples_of_a_worker_that_is_stopped_are_read_by_another(caplog, tmp_path):
    """It does not even hear that it is to end."""
    bad, once = expected(6)[-1], tmp_path / "once"

    def read(k: int) -> None:
        if k == bad and not once.exists():
            once.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    with processes(Squares(read=read), timeout_s=3.0) as loader:
        assert take(loader, 10) == expected(10)
        assert loader.lost_workers == 1
        stopped = int(once.read_text())
        wait_until(lambda: not alive(stopped))
    (told,) = caplog.records
    assert told.getMessage().startswith(
        f"worker {stopped} of the data was lost at sample {bad} of Squares, another has its place"
    )


@pytest.mark.extended
@pytest.mark.parametrize("thread_safe", [False, True])
def test_a_sample_that_sticks_once_is_read_by_another_thread(caplog, thread_safe):
    """Which waits for the first one where the dataset is to be read by one at a time."""
    bad, go_on, stuck = expected(6)[-1], threading.Event(), []

    def read(k: int) -> None:
        if k == bad and not stuck:
            stuck.append(threading.current_thread())
            go_on.wait(60 if thread_safe else 3)

    dataset = Squares(read=read)
    dataset.thread_safe = thread_safe
    with processes(dataset, timeout_s=2.0, kind="threads") as loader:
        assert take(loader, 5) == expected(5)
        batch = next(loader)
        assert batch["k"].tolist() == expected(6)[30:]
        assert loader.lost_workers == 1 and loader.cursor.position == 6 * 8
        batch["square"].fill_(-1.0)
        go_on.set()  # what the first one writes now is nobody's
        stuck[0].join(60)
        assert not stuck[0].is_alive() and bool((batch["square"] == -1.0).all())
        assert take(loader, 5) == expected(11)[36:]
    (told,) = caplog.records
    assert told.getMessage() == (
        f"a thread of the data was stuck at sample {bad} of Squares, another has its place: "
        "it was at it for more than 2 s"
    )


def test_a_sample_that_sticks_in_two_threads_stops_the_run_and_is_named():
    bad, go_on = expected(4)[-1], threading.Event()

    def read(k: int) -> None:
        if k == bad:
            go_on.wait(60)

    with processes(Squares(read=read), num_workers=1, kind="threads", timeout_s=0.5) as loader:
        assert take(loader, 3) == expected(3)
        for _ in range(2):
            with raises(TrainingError, code="data-thread-stuck", what=bad) as caught:
                next(loader)
            assert "timeout" in caught.value.fix
            assert loader.cursor.position == 3 * 8
        go_on.set()
        assert take(loader, 3) == expected(6)[18:]
