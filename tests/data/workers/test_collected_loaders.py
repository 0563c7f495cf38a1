"""Loaders and batches end well wherever they are collected, and in processes that are forked."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable

import pytest

from gpumix.data.workers.shared_memory import Arena
from gpumix.data.workers.worker_pool import ProcessWorkerPool
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.waiting import wait_until
from helpers.samples.squares import Squares, alive, expected, pids, processes, take

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")


def test_a_batch_may_be_collected_while_memory_for_another_is_taken():
    """Where batches are part of a cycle, any call may collect them."""

    class Free(list):
        def pop(self, *place):
            lent.clear()
            return super().pop(*place)

    slots = Arena(2, 1)
    first = slots.take()
    lent = [slots.lend(first, 1)]
    slots._free = Free(slots._free)
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(slots.take()), daemon=True)
    thread.start()
    wait_until(lambda: bool(found))
    assert {found[0], slots.take()} == {0, 1}


def test_workers_end_with_the_last_reference_to_a_loader_that_was_used_after_it_was_closed():
    loader = processes(Squares())
    loader.close()
    next(loader)
    some = pids(loader)
    del loader
    gc.collect()
    wait_until(lambda: not any(map(alive, some)))


def test_workers_end_wherever_the_loader_is_collected(monkeypatch):
    """Loaders that are part of a cycle may be found by any thread: the one that listens, too."""
    loader = processes(Squares())
    next(loader)
    some = pids(loader)
    cycle = [loader]
    cycle.append(cycle)  # type: ignore[arg-type]
    gc.disable()
    try:
        del loader, cycle
        look = ProcessWorkerPool._look_for_stuck
        monkeypatch.setattr(
            ProcessWorkerPool, "_look_for_stuck", lambda crew: (gc.collect(), look(crew))
        )
        wait_until(lambda: not any(map(alive, some)))
    finally:
        gc.enable()


def forked(does: Callable[[], object]) -> int:
    """How a process ends that does this."""
    child = os.fork()
    if not child:
        try:
            does()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_process_that_is_forked_leaves_the_workers_alone(kind):
    def child() -> None:
        with raises(InputError, code="loader-in-forked-process"):
            next(loader)
        loader.close()

    with processes(Squares(), kind=kind) as loader:
        found = take(loader, 2)
        assert forked(child) == 0
        assert found + take(loader, 20) == expected(22)
        assert loader.lost_workers == 0
