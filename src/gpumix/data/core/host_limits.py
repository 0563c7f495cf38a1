"""Host resources for the data of one rank: cores, and memory for batches."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from gpumix.hardware.host.cpu import count_cores
from gpumix.hardware.host.environment import (
    available_host_bytes,
    get_local_rank,
    get_local_world_size,
)
from gpumix.schema.plan.batch_shares import Shares, get_batch_share
from gpumix.schema.plan.plan import Plan

BATCH_MEMORY_SHARE = 0.1  # of the host's free memory, for prefetched batches of all ranks
MAX_BATCH_BYTES = 4 * 2**30
# mallopt(3) parameters, and environment variables for them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 256 * 2**20, 32 * 2**20
_MALLOC_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)
_SCHEDSTAT_FILE = "/proc/thread-self/schedstat"  # nanoseconds running, and waiting for a core


def read_core_wait_s() -> float:
    """Return the seconds this thread was runnable but had no core; 0 if the system does not report
    it. A call takes 5 us."""
    try:
        file = os.open(_SCHEDSTAT_FILE, os.O_RDONLY)
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
    if any(name in os.environ for name in _MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES))


def get_rank_cores(shares: Shares, rank: int) -> float:
    """Return the rank's cores: a host divides its cores among ranks by samples read."""
    own = _count_samples(shares, rank)
    together = sum(_count_samples(shares, other) for other in _find_host_ranks(shares, rank))
    return count_cores() * own / together if own and together else 1.0


def batch_memory_bytes(shares: Shares, rank: int) -> int:
    """Return the memory available for this rank's prefetched batches."""
    ranks = len(_find_host_ranks(shares, rank))
    return min(MAX_BATCH_BYTES, int(available_host_bytes() * BATCH_MEMORY_SHARE) // ranks)


def _count_samples(shares: Shares, rank: int) -> int:
    return sum(map(len, get_batch_share(shares, rank).rows()))


def _find_host_ranks(shares: Shares, rank: int) -> list[int]:
    """Return all ranks on the host of `rank`, including itself."""
    if isinstance(shares, Plan):
        host = shares.workers[rank].host
        return [n for n, worker in enumerate(shares.workers) if worker.host == host]
    # Without a plan: launchers report the ranks per host, and number ranks host by host.
    first = rank - get_local_rank()
    return [n for n in range(first, first + get_local_world_size()) if 0 <= n < len(shares)] or [
        rank
    ]
