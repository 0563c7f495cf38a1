"""The lock of the cache: exclusive, released by death, and it names who holds it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpumix.data.core.build_lock import hold_build_lock
from gpumix.schema.errors import MachineError
from helpers.errors import raises

HOLD = """
import sys, time
from pathlib import Path
from gpumix.data.core.build_lock import hold_build_lock
with hold_build_lock(Path(sys.argv[1]), wait_s=10):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """(lock file, process that holds it)."""
    path = tmp_path / "x.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield path, process
    process.kill()
    process.communicate()


def test_a_holder_without_progress_is_named(holder):
    path, process = holder
    with (
        raises(MachineError, code="packing-lock-held", what=(process.pid, "0.2")),
        hold_build_lock(path, wait_s=0.2),
    ):
        pass


def test_the_lock_of_a_dead_process_is_free(holder):
    path, process = holder
    process.kill()
    process.wait()
    with hold_build_lock(path, wait_s=0.2):
        assert str(process.pid) not in path.read_text()


def test_waiting_lasts_as_long_as_there_is_progress(tmp_path):
    path = tmp_path / "x.lock"
    waiting, entered = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        with hold_build_lock(path, wait_s=1.0):
            entered.set()

    with hold_build_lock(path, wait_s=1) as heartbeat:
        waiter = threading.Thread(target=wait)
        waiter.start()
        waiting.wait()
        for _ in range(15):  # 1.5 seconds: more than the waiter's patience without a heartbeat
            heartbeat()
            assert not entered.wait(0.1)
    waiter.join()
    assert entered.is_set()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        raises(MachineError, code="cache-not-lockable") as caught,
        hold_build_lock(tmp_path / "file" / "x.lock", wait_s=1),
    ):
        pass
    assert "writable" in caught.value.fix
