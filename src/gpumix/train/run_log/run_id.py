"""Identity of a run, unlike earlier runs in its output folder.

Copies in memory outlive a run, and its folder too, so they carry the run's id. The id lies in the
folder, stays on restart and resume, and changes when a run starts from scratch. Only the run's user
can read it: anyone knowing it could make the folder of the copies first. Imports no torch.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from gpumix.schema.files import MARK_BYTES, forget_parts, read_text, write_at_once
from gpumix.train.run_log import run_files


def id_of(output: Path) -> str:
    """Return the id of the run in a folder; empty without a run."""
    try:
        found = read_text(output / run_files.ID, MARK_BYTES)
    except (OSError, ValueError):
        return ""
    return found if re.fullmatch("[0-9a-f]{32}", found) else ""


def give_id(output: Path, *, fresh: bool) -> None:
    """Give the run in a folder an id, if missing or `fresh`. Remove partial files of processes that
    died while writing.

    Raises:
        OSError: the folder is not writable.
    """
    forget_parts(output)
    if fresh or not id_of(output):
        write_at_once(output / run_files.ID, uuid.uuid4().hex, mode=0o600)


def is_later(file: Path) -> bool:
    """Return True if a file in a run's folder was written after the run got its id."""
    try:
        return file.stat().st_mtime_ns >= (file.parent / run_files.ID).stat().st_mtime_ns
    except OSError:
        return False
