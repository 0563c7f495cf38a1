"""What tells a run from others that had its output folder before it.

Copies in memory outlive a run, and its folder too. So they are kept by the run's id: it lies in the
folder, stays when the run starts again or is resumed, and is another one when a run begins anew.
Nothing here imports torch.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from gpumix.spec.files import read_text
from gpumix.train import run_files
from gpumix.train.progress import write_at_once


def id_of(output: Path) -> str:
    """That of the run in a folder; empty where there is none."""
    try:
        found = read_text(output / run_files.ID)
    except (OSError, ValueError):
        return ""
    return found if re.fullmatch("[0-9a-f]{32}", found) else ""


def give_id(output: Path, *, fresh: bool) -> None:
    """Give the run in a folder an id, if it has none or begins anew (`fresh`).

    Raises:
        OSError: the folder cannot be written.
    """
    if fresh or not id_of(output):
        write_at_once(output / run_files.ID, uuid.uuid4().hex)


def is_later(file: Path) -> bool:
    """Whether a file in a run's folder was written after the run got its id."""
    try:
        return file.stat().st_mtime_ns >= (file.parent / run_files.ID).stat().st_mtime_ns
    except OSError:
        return False
