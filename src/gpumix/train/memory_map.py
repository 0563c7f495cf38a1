"""Files as memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gpumix.spec.files import opened_anew, remove_quietly


def made(file: Path, size: int) -> torch.Tensor:
    """A new file of so many bytes.

    Raises:
        OSError: there is no room for it.
    """
    descriptor = opened_anew(file)
    try:
        if size:  # now: a page for which there is no room later ends the process
            os.posix_fallocate(descriptor, 0, size)
    except OSError:
        remove_quietly(file)
        raise
    finally:
        os.close(descriptor)
    return mapped(file)


def mapped(file: Path) -> torch.Tensor:
    """The bytes of a file, without reading it."""
    size = file.stat().st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
