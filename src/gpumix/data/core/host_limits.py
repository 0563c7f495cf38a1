"""Host resources for the data of one rank: cores, and memory for batches."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from gpumix.hardware.host.cpu import cores_here
from gpumix.hardware.host.environment import available_host_bytes, place_here, ranks_here
from gpumix.schema.plan.batch_shares import Shares, share_of
from gpumix.schema.plan.plan import Plan

MEMORY_PART = 0.1  # of the host's free memory, for prefetched batches of all ranks
MOST_BYTES = 4 * 2**30
# mallopt(3) parameters, and environment variables for them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 256 * 2**20, 32 * 2**20
_SET = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
_OF_THREAD = "/proc/thread-self/schedstat"  # nanoseconds running, and waiting for a core


def waited_for_core_s() -> float:
    """Return the seconds this thread was runnable but had no core; 0 if the system does not report
    it. A call takes 5 us."""
    try:
        file = os.open(_OF_THREAD, os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return int(os.read(file, 80).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
    finally:
        os.close(file)


@cache
def keep_freed_memory() -> bool:
    """Make the process keep freed memory for the next samples. By default glibc returns samples of
    a megabyte to the system one by one, and fresh pages make a fast decoder 1.5 times as slow.
    Return False with another C library, or if the user has configured malloc."""
    if any(name in os.environ for name in _SET):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES))


def cores_for(shares: Shares, rank: int) -> float:
    """Return the rank's cores: a host divides its cores among ranks by samples read."""
    own = _samples(shares, rank)
    together = sum(_samples(shares, other) for other in _neighbours(shares, rank))
    return cores_here() * own / together if own and together else 1.0


def batch_memory_bytes(shares: Shares, rank: int) -> int:
    """Return the memory available for this rank's prefetched batches."""
    ranks = len(_neighbours(shares, rank))
    return min(MOST_BYTES, int(available_host_bytes() * MEMORY_PART) // ranks)


def _samples(shares: Shares, rank: int) -> int:
    return sum(map(len, share_of(shares, rank).rows()))


def _neighbours(shares: Shares, rank: int) -> list[int]:
    """Return all ranks on the host of `rank`, including itself."""
    if isinstance(shares, Plan):
        host = shares.workers[rank].host
        return [n for n, worker in enumerate(shares.workers) if worker.host == host]
    # Without a plan: launchers report the ranks per host, and number ranks host by host.
    first = rank - place_here()
    return [n for n in range(first, first + ranks_here()) if 0 <= n < len(shares)] or [rank]
