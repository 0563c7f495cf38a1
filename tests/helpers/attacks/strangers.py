"""A second user of the machine, as far as files go: what is theirs has another owner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be a second user")


def give_away(path: Path) -> Path:
    """Make a file, a link or a folder another user's."""
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return path


def linked(path: Path, target: Path) -> Path:
    """A link of another user."""
    path.symlink_to(target)
    return give_away(path)
