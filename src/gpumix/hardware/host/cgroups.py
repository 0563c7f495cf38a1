"""Memory and CPU limits from the control groups (cgroups v1 and v2) of this process.

The limits of all enclosing groups apply, from the process's own to the outermost visible one: a
scheduler or systemd sets limits deep inside; a container shows its own group as the outermost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpumix.schema.files import read_log

_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS_FILE = Path("/proc/self/cgroup")
_UNIFIED = "unified"  # version 2 next to version 1
_PAGE_CACHE_FIELDS = (
    "inactive_file",
    "active_file",
)  # page cache, reclaimed by the kernel on demand


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a memory limit.

    Attributes:
        most_bytes: limit before processes are throttled or killed.
        used_bytes: memory in use that cannot be reclaimed, unlike the page cache.
    """

    limit_bytes: int
    used_bytes: int


def read_memory_groups() -> list[MemoryGroup]:
    """Return the groups with a memory limit."""
    found = []
    for folder in _iterate_folders("memory"):
        limits = ("memory.max", "memory.high", "memory.limit_in_bytes")
        known = [most for name in limits if (most := _number(folder / name)) is not None]
        used = _number(folder / "memory.current")
        if used is None:
            used = _number(folder / "memory.usage_in_bytes") or 0
        if known:
            found.append(MemoryGroup(min(known), max(0, used - _read_page_cache_bytes(folder))))
    return found


def limit_host_bytes(host_bytes: int) -> int:
    """Return the bytes of host memory allowed by all groups."""
    return min([host_bytes, *(group.limit_bytes for group in read_memory_groups())])


def read_core_quotas() -> list[float]:
    """Return the core quota of each group with a quota."""
    found = []
    for folder in _iterate_folders("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # the file is missing, or says "max"
                text = " ".join(read_log(folder / name) for name in names)
                quota, period = map(int, text.split()[:2])
                if quota > 0 and period > 0:
                    found.append(quota / period)
    return found


def _iterate_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups, as far as visible."""
    paths = [(_ROOT, "/"), (_ROOT / controller, "/")]
    with suppress(OSError):
        for line in read_log(_OWN_GROUPS_FILE).splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                paths += [(_ROOT, path), (_ROOT / _UNIFIED, path)]
            elif controller in controllers.split(","):
                paths += [(_ROOT / controller, path), (_ROOT / controllers, path)]
    seen = set()
    for base, path in paths:
        parts = Path(path).parts[1:]
        if ".." in parts:  # a namespace hides the outer part of the path
            parts = ()
        for depth in range(len(parts) + 1):
            seen.add(base.joinpath(*parts[:depth]))
    yield from sorted(seen)


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):  # the file is missing, or says "max"
        return int(read_log(file))
    return None


def _read_page_cache_bytes(folder: Path) -> int:
    """Return the page-cache bytes of a group's processes, including subgroups."""
    told: dict[str, int] = {}
    with suppress(OSError, ValueError):
        lines = read_log(folder / "memory.stat").splitlines()
        told = {name: int(value) for name, value in map(str.split, lines)}
    return sum(told.get(f"total_{name}", told.get(name, 0)) for name in _PAGE_CACHE_FIELDS)
