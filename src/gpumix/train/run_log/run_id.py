"""Identity of a run, unlike earlier runs in its output folder.

Copies in memory outlive a run, and its folder too, so they carry the run's id. The id lies in the
folder, stays on restart and resume, and changes when a run starts from scratch. Only the run's user
can read it: anyone knowing it could make the folder of the copies first. Imports no torch.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from gpumix.schema.files import MARK_BYTES, read_text, remove_partial_files, write_text_atomically
from gpumix.train.run_log import run_files


def read_run_id(output: Path) -> str:
    """Return the id of the run in a folder; empty without a run."""
    try:
        found = read_text(output / run_files.ID, MARK_BYTES)
    except (OSError, ValueError):
        return ""
    return found if re.fullmatch("[0-9a-f]{32}", found) else ""


def assign_run_id(output: Path, *, fresh: bool) -> None:
    """Give the run in a folder an id, if missing or `fresh`. Remove partial files of processes that
    died while writing.

    Raises:
        OSError: the folder is not writable.
    """
    remove_partial_files(output)
    if fresh or not read_run_id(output):
        write_text_atomically(output / run_files.ID, uuid.uuid4().hex, mode=0o600)


def is_newer_than_run_id(file: Path) -> bool:
    """Return True if a file in a run's folder was written after the run got its id."""
    try:
        return file.stat().st_mtime_ns >= (file.parent / run_files.ID).stat().st_mtime_ns
    except OSError:
        return False
