"""Memory-mapped files as tensors."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gpumix.schema.files import create_private_file, remove_quietly


def create_mapped_file(file: Path, size: int) -> torch.Tensor:
    """Create a file of `size` bytes and map its content.

    Raises:
        OSError: no room for the file.
    """
    descriptor = create_private_file(file)
    try:
        if size:  # allocate now: a page without room later ends the process
            os.posix_fallocate(descriptor, 0, size)
    except OSError:
        remove_quietly(file)
        raise
    finally:
        os.close(descriptor)
    return map_file(file)


def map_file(file: Path) -> torch.Tensor:
    """Map the bytes of a file without reading them."""
    size = file.stat().st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
