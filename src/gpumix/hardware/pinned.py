"""Memory of the host that a GPU copies to and from by itself, while the host goes on.

torch's own allocator of such memory rounds each piece up to a power of two: 17 GiB take 32. Here
whole pages are mapped and registered with the driver, so that a piece takes what it asks for, and
at most a page more.
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
from gpumix.spec.units import show_bytes


class _Pages(mmap.mmap):
    """A mapping that is registered with the driver for as long as it exists.

    Shared, also where it is of no file: of private pages that are registered a fork would leave
    the parent copies at its next write, and the GPU the old ones.
    """

    _address = 0  # of what is registered
    _process = 0  # that registered it

    def register(self, address: int) -> None:
        if runtime.register_pinned(address, len(self)):
            self._address, self._process = address, os.getpid()
        else:
            _say_refused(len(self))

    def __del__(self) -> None:
        # The process's end takes everything back; a fork has nothing to take back.
        if self._address and self._process == os.getpid() and not sys.is_finalizing():
            runtime.synchronize()  # a copy may be on its way, of which no allocator knows
            runtime.unregister_pinned(self._address)


def pinned_memory(size_bytes: int, file: Path | None = None) -> torch.Tensor:
    """So many bytes, uint8, at the beginning of a page; given back when no tensor uses them. Who
    drops the last one need not wait for copies.

    Where the driver refuses to register them they are ordinary memory: copies are right, but the
    host waits for them. That is told once.

    Args:
        file: whose bytes they are: it has as many. None: they are nobody's, and all zero.

    Raises:
        OSError: there is no room for them.
    """
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    if file is None:
        pages = _Pages(-1, size_bytes)
    else:
        descriptor = os.open(file, os.O_RDWR)
        try:
            pages = _Pages(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # which keeps the mapping
    pages.register(memory.data_ptr())
    return memory


@cache
def _say_refused(size_bytes: int) -> None:
    logging.getLogger(__name__).warning(
        "the driver registers no memory of the host (%s were asked for): copies between the GPU "
        "and its host hold up the host; see `ulimit -l`, or what limits the memory of a container",
        show_bytes(size_bytes),
    )
