"""Memory shared by processes of a host that are not each other's children.

A segment is an anonymous file in memory: it takes no space in /dev/shm, which containers keep
small, and ends with its processes. Others open it through the /proc entry of the process that made
it. Where processes do not see each other there, a named file in a folder of this user alone serves,
whose name goes away as soon as all have opened it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gpumix.hardware.host.environment import available_host_bytes, shared_memory_folder
from gpumix.hardware.host.pinned import allocate_pinned
from gpumix.schema import files
from gpumix.schema.errors import MachineError
from gpumix.schema.units import show_bytes

_NAME = "gpumix-parameters"
_TOKEN_BYTES = 8  # of the random part of a folder's name


@dataclass(frozen=True)
class SegmentPlace:
    """Where processes of this host find a segment: an open file of a process, and the file's number
    to know it again. `token` is part of the name of a named file; 0 for anonymous ones."""

    process: int
    descriptor: int
    number: int
    token: int = 0

    @property
    def path(self) -> Path:
        if not self.token:
            return Path(f"/proc/{self.process}/fd/{self.descriptor}")
        name = self.token.to_bytes(_TOKEN_BYTES, "big").decode()
        return _find_root() / f"{_NAME}-{name}" / "segment"


@contextmanager
def create_segment(size_bytes: int, *, named: bool = False) -> Iterator[SegmentPlace]:
    """Create a segment with all of its memory, which other processes can map in the body. At its
    end, also by an error, the place goes away: the memory lives as long as it is mapped.

    Args:
        named: make a named file, for processes that cannot see each other's open files. A name left
            by a killed process is removed by the next that makes one.

    Raises:
        MachineError: there is not so much memory.
    """
    _check_available(size_bytes)
    with ExitStack() as stack:
        try:
            token = 0
            if named:
                folder = stack.enter_context(files.make_scratch_folder(_find_root(), f"{_NAME}-"))
                token = int.from_bytes(folder.name[-_TOKEN_BYTES:].encode(), "big")
                descriptor = files.create_private_file(folder / "segment")
            else:
                descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            stack.callback(os.close, descriptor)
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            raise MachineError(
                f"{show_bytes(size_bytes)} of memory cannot be shared between the devices of this "
                "host",
                code="host-memory-not-shared",
                why=error.strerror or str(error),
                fix="make /dev/shm larger (docker run --shm-size=64g, or sudo mount -o "
                "remount,size=64G /dev/shm), or plan without `parameters_on: host`"
                if named
                else "free memory of the host, or plan without `parameters_on: host`",
            ) from error
        yield SegmentPlace(os.getpid(), descriptor, os.fstat(descriptor).st_ino, token)


def map_segment(place: SegmentPlace, size_bytes: int, *, pinned: bool) -> torch.Tensor | None:
    """Map a segment as uint8 tensor; None if this process cannot see it.

    Args:
        pinned: register the memory with the driver, for copies from and to a GPU.

    Raises:
        MachineError: a limit of this process is reached, or the driver does not register the
            memory.
    """
    try:
        return _map_file(place, size_bytes, pinned=pinned)
    except (FileNotFoundError, NotADirectoryError, PermissionError, ProcessLookupError):
        return None
    except OSError as error:
        raise MachineError(
            f"{show_bytes(size_bytes)} of memory shared by the devices of this host cannot be "
            "mapped",
            code="host-memory-not-shared",
            why=error.strerror or str(error),
            fix="raise the limits of a process (ulimit -v unlimited; ulimit -n 65536), or plan "
            "without `parameters_on: host`",
        ) from error


def _map_file(place: SegmentPlace, size_bytes: int, *, pinned: bool) -> torch.Tensor | None:
    descriptor = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_ino != place.number or found.st_size != size_bytes:
            return None  # another process has that number here
        if pinned:
            file = Path(f"/proc/self/fd/{descriptor}")
            return allocate_pinned(size_bytes, file, required=True)
        return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _find_root() -> Path:
    return shared_memory_folder() or Path("/dev/shm")


def _check_available(size_bytes: int) -> None:
    """Refuse memory that the kernel would grant and then kill processes for."""
    free = available_host_bytes()
    if size_bytes > free:
        raise MachineError(
            f"{show_bytes(size_bytes)} of the host's memory are needed for parameters, "
            f"{show_bytes(free)} are free",
            code="host-memory-short",
            why="limits of a container or a job count too",
            fix="free memory, raise the limit of the container or job, or plan without "
            "`parameters_on: host`",
        )
