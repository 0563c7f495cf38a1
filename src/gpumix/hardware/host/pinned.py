"""Pinned host memory: a GPU copies to and from it asynchronously.

torch's own pinned allocator rounds sizes up to a power of two: 17 GiB take 32. Here whole pages are
mapped and registered with the driver, so the overhead is at most a page.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from functools import cache
from pathlib import Path

import torch

from gpumix.hardware import runtime
from gpumix.schema.errors import MachineError
from gpumix.schema.units import show_bytes


class _PinnedPages(mmap.mmap):
    """A mapping registered with the driver during its lifetime.

    Shared, even without a file: after a fork, the parent's next write to private pages would create
    copies, while the GPU kept using the old pages.
    """

    _address = 0  # of the registered memory
    _process = 0  # the registering process

    def register(self, address: int, *, required: bool) -> None:
        if runtime.register_pinned(address, len(self)):
            self._address, self._process = address, os.getpid()
        elif required:
            raise MachineError(
                f"the driver does not register {show_bytes(len(self))} of the host's memory, from "
                "which GPUs are to copy parameters",
                code="host-memory-not-registered",
                why="locked memory is limited, or the container's memory",
                fix="raise the limit (ulimit -l unlimited, docker run --ulimit memlock=-1), or "
                "plan without `parameters_on: host`",
            )
        else:
            _warn_refused(len(self))

    def __del__(self) -> None:
        # Process exit releases everything; a fork has nothing to release.
        if self._address and self._process == os.getpid() and not sys.is_finalizing():
            runtime.synchronize()  # copies unknown to any allocator may still run
            runtime.unregister_pinned(self._address)


def allocate_pinned(
    size_bytes: int, file: Path | None = None, *, required: bool = False
) -> torch.Tensor:
    """Allocate pinned memory as a page-aligned uint8 tensor. Dropping the last tensor releases the
    memory; callers need not wait for copies.

    If the driver refuses registration, the memory is ordinary: copies are correct, but the host
    waits for them. A warning is logged once.

    Args:
        file: file to map, of `size_bytes`; None maps anonymous zeros.
        required: refuse ordinary memory.

    Raises:
        OSError: there is not enough memory.
        MachineError: the driver refuses required registration.
    """
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    if file is None:
        pages = _PinnedPages(-1, size_bytes)
    else:
        descriptor = os.open(file, os.O_RDWR)
        try:
            pages = _PinnedPages(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping alive
    pages.register(memory.data_ptr(), required=required)
    return memory


@cache
def _warn_refused(size_bytes: int) -> None:
    logging.getLogger(__name__).warning(
        "the driver registers no memory of the host (%s were asked for): copies between the GPU "
        "and its host hold up the host; see `ulimit -l`, or what limits the memory of a container",
        show_bytes(size_bytes),
    )
