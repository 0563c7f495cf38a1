"""Checks of a run's folder before anything is measured, and its lock."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.files import find_special_kind, open_lock_file
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.step_trace import Trace
from gpumix.schema.profile.profile import Profile
from gpumix.schema.value import Document
from gpumix.train.run_log import run_files
from gpumix.train.run_log.run_id import assign_run_id
from gpumix.train.run_manifest import RunRecord

_DOCUMENTS: dict[str, type[Document]] = {
    run_files.RUN: RunRecord,
    run_files.PROFILE: Profile,
    run_files.PLAN: Plan,
}


def check_folder(folder: Path, *, traces: bool = False) -> None:
    """Check that a run neither waits for a special file nor overwrites foreign documents.

    Args:
        traces: whether the run writes a trace.

    Raises:
        InputError: a pipe, a socket or a device is there, or a document that may not be replaced.
    """
    for name in sorted(run_files.ALL):
        if thing := find_special_kind(folder / name):
            raise InputError(
                f"it is {thing}, where a run has a file",
                code="output-file-in-the-way",
                where=str(folder / name),
                fix="write elsewhere, or remove it",
            )
    documents = _DOCUMENTS | ({run_files.TRACE: Trace} if traces else {})
    for name, kind in documents.items():
        kind.check_replaceable(folder / name)


def check_writable(folder: Path) -> None:
    """Check that a folder can be made, or written into, without doing so.

    Raises:
        MachineError: it cannot.
    """
    place = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not place.is_dir():
        raise _make_not_writable_error(folder, OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(place, os.W_OK | os.X_OK):
        raise _make_not_writable_error(folder, OSError(errno.EACCES, os.strerror(errno.EACCES)))


def check_free(output: Path) -> None:
    """Check that no run has the lock: its checkpoints would be unfinished.

    Raises:
        InputError: a run has it.
    """
    if is_locked(output):
        raise _make_locked_error(output)


def is_locked(output: Path) -> bool:
    """Return whether a run has the lock of its folder."""
    try:
        lock = os.fdopen(open_lock_file(output / run_files.LOCK, make=False), "r+b")
    except OSError:  # no run yet, or not writable: reported when locking
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def lock_output(output: Path, *, fresh: bool) -> Iterator[None]:
    """Lock the run's folder: two runs would overwrite each other's files. The end of this process
    releases the lock. A `fresh` run gets a new id.

    Raises:
        InputError: another run has the lock.
        MachineError: the folder is not writable.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(open_lock_file(output / run_files.LOCK), "r+b")
    except OSError as error:
        raise _make_not_writable_error(output, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _make_locked_error(output) from None
        try:
            assign_run_id(output, fresh=fresh)
        except OSError as error:
            raise _make_not_writable_error(output, error) from error
        yield


def _make_not_writable_error(output: Path, error: OSError) -> MachineError:
    return MachineError(
        "cannot write into the output folder",
        code="output-not-writable",
        where=str(output),
        why=error.strerror or str(error),
        fix="write elsewhere: --set output_dir=runs/another",
    )


def _make_locked_error(output: Path) -> InputError:
    return InputError(
        "another run writes into the output folder",
        code="output-folder-in-use",
        where=str(output),
        fix="wait for its end, or write elsewhere: --set output_dir=runs/another",
    )
