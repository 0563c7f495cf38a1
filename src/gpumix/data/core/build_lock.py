"""Exclusive lock on a file, with a heartbeat: one builder at a time.

The kernel owns the lock (`flock`): it is free as soon as its process dies, and never stale. The
text of the file names the holder; its time stamp is the holder's last progress.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpumix.schema.errors import MachineError
from gpumix.schema.files import open_lock_file, read_log

_POLL_S = 0.05


@contextmanager
def hold_build_lock(path: Path, *, wait_s: float = 300.0) -> Iterator[Callable[[], None]]:
    """Hold the lock `path` inside the block; the value is a heartbeat to call on progress.

    Waits as long as the holder makes progress, and `wait_s` seconds beyond its last heartbeat. The
    file stays when the block ends: deleting it would let two processes lock two files of one name.

    Raises:
        MachineError: the holder made no progress for `wait_s`, or the file cannot be locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open_lock_file(path)
    except OSError as error:
        raise _make_lock_error(path, error) from error
    try:
        _acquire(handle, path, wait_s)
        _write_holder(handle, path)
        yield lambda: os.utime(handle)
    finally:
        os.close(handle)


def _acquire(handle: int, path: Path, wait_s: float) -> None:
    last_beat, deadline = 0, 0.0
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            beat = os.fstat(handle).st_mtime_ns
        except OSError as error:
            raise _make_lock_error(path, error) from error
        if beat != last_beat:
            last_beat, deadline = beat, time.monotonic() + wait_s
        elif time.monotonic() > deadline:
            raise _make_stalled_error(path, wait_s)
        time.sleep(_POLL_S)


def _write_holder(handle: int, path: Path) -> None:
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
    except OSError as error:
        raise _make_lock_error(path, error) from error


def _make_stalled_error(path: Path, wait_s: float) -> MachineError:
    holder = read_log(path).strip() or "an unknown process"
    return MachineError(
        f"{holder} is packing this text and made no progress for {wait_s:g} s",
        code="packing-lock-held",
        where=str(path),
        fix="look at that process; once it has ended, run this again",
    )


def _make_lock_error(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"cannot lock a file in the cache: {error.strerror}",
        code="cache-not-lockable",
        where=str(path),
        fix=f"make {path.parent} writable, or use a cache on a local disk",
    )
