"""What tells a run from others that had its output folder before it.

Copies in memory outlive a run, and its folder too. So they are kept by the run's id: it lies in the
folder, stays when the run starts again or is resumed, and is another one when a run begins anew.
Only the run's user can read it: who knew it could make the folder of its copies first.
Nothing here imports torch.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from gpumix.spec.files import MARK_BYTES, forget_parts, read_text, write_at_once
from gpumix.train import run_files


def id_of(output: Path) -> str:
    """That of the run in a folder; empty where there is none."""
    try:
        found = read_text(output / run_files.ID, MARK_BYTES)
    except (OSError, ValueError):
        return ""
    return found if re.fullmatch("[0-9a-f]{32}", found) else ""


def give_id(output: Path, *, fresh: bool) -> None:
    """Give the run in a folder an id, if it has none or begins anew (`fresh`);
    what processes left there that died while they wrote is removed.

    Raises:
        OSError: the folder cannot be written.
    """
    forget_parts(output)
    if fresh or not id_of(output):
        write_at_once(output / run_files.ID, uuid.uuid4().hex, mode=0o600)


def is_later(file: Path) -> bool:
    """Whether a file in a run's folder was written after the run got its id."""
    try:
        return file.stat().st_mtime_ns >= (file.parent / run_files.ID).stat().st_mtime_ns
    except OSError:
        return False
