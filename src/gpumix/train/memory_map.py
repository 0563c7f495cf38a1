"""Files as memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def made(file: Path, size: int) -> torch.Tensor:
    """A new file of so many bytes.

    Raises:
        OSError: there is no room for it.
    """
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if size:  # now: a page for which there is no room later ends the process
            os.posix_fallocate(descriptor, 0, size)
    except OSError:
        file.unlink()
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
