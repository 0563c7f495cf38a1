"""What this host has for the data of one rank: cores, and memory for batches."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gpumix.spec.plan import Plan
from gpumix.spec.shares import Shares, share_of

MEMORY_PART = 0.1  # of what is free on the host that batches ahead may take, over all ranks
MOST_BYTES = 4 * 2**30
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores_here() -> float:
    """Cores that this process may use: its affinity, and its group's quota."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)
    count = count or float(os.cpu_count() or 1)
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()[:2]
        count = min(count, int(quota) / int(period))
    return count


def cores_for(shares: Shares, rank: int) -> float:
    """This rank's part of them: ranks of one host share its cores by the samples that they read."""
    own = _samples(shares, rank)
    together = sum(_samples(shares, other) for other in _neighbours(shares, rank))
    return cores_here() * own / together if own and together else 1.0


def batch_memory_bytes() -> int:
    """What batches that are fetched ahead may take."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return min(MOST_BYTES, int(free * MEMORY_PART) // ranks)


def _samples(shares: Shares, rank: int) -> int:
    return sum(map(len, share_of(shares, rank).rows()))


def _neighbours(shares: Shares, rank: int) -> list[int]:
    """The ranks of this host, this one among them."""
    if isinstance(shares, Plan):
        host = shares.workers[rank].host
        return [n for n, worker in enumerate(shares.workers) if worker.host == host]
    # Without a plan: launchers say how many there are, and number them host by host.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    return [n for n in range(first, first + local) if 0 <= n < len(shares)] or [rank]
