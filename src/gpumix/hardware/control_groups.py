"""What the control groups of this process, of either version, let it have: memory and cores.

The limits of all groups that it is in count, from its own to the outermost that can be seen: a
scheduler or systemd sets them deep inside, a container shows its own group as the outermost one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpumix.spec.files import read_log

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_UNIFIED = "unified"  # where version 2 is beside version 1
_FILES = ("inactive_file", "active_file")  # in memory; the kernel gives it up for what asks


@dataclass(frozen=True)
class MemoryGroup:
    """
    Attributes:
        most_bytes: that its processes may have before they are held up or ended.
        used_bytes: that cannot be given up for others, as that which keeps files can.
    """

    most_bytes: int
    used_bytes: int


def memory_groups() -> list[MemoryGroup]:
    """Those that have a limit."""
    found = []
    for folder in _folders("memory"):
        limits = ("memory.max", "memory.high", "memory.limit_in_bytes")
        known = [most for name in limits if (most := _number(folder / name)) is not None]
        used = _number(folder / "memory.current")
        if used is None:
            used = _number(folder / "memory.usage_in_bytes") or 0
        if known:
            found.append(MemoryGroup(min(known), max(0, used - _kept_files_bytes(folder))))
    return found


def let_have_bytes(host_bytes: int) -> int:
    """What the groups let this process have of its host's memory."""
    return min([host_bytes, *(group.most_bytes for group in memory_groups())])


def core_quotas() -> list[float]:
    """Cores that the groups which have a quota may use."""
    found = []
    for folder in _folders("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # there are none, or "max"
                text = " ".join(read_log(folder / name) for name in names)
                quota, period = map(int, text.split()[:2])
                if quota > 0 and period > 0:
                    found.append(quota / period)
    return found


def _folders(controller: str) -> Iterator[Path]:
    """Of the groups that this process is in, as far as they can be seen."""
    paths = [(_ROOT, "/"), (_ROOT / controller, "/")]
    with suppress(OSError):
        for line in read_log(_OWN).splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                paths += [(_ROOT, path), (_ROOT / _UNIFIED, path)]
            elif controller in controllers.split(","):
                paths += [(_ROOT / controller, path), (_ROOT / controllers, path)]
    seen = set()
    for base, path in paths:
        parts = Path(path).parts[1:]
        if ".." in parts:  # of a namespace that shows less than the group is in
            parts = ()
        for depth in range(len(parts) + 1):
            seen.add(base.joinpath(*parts[:depth]))
    yield from sorted(seen)


def _number(file: Path) -> int | None:
    with suppress(OSError, ValueError):  # there is none, or "max"
        return int(read_log(file))
    return None


def _kept_files_bytes(folder: Path) -> int:
    """What its processes, and those of the groups in it, read of files and is kept in memory."""
    told: dict[str, int] = {}
    with suppress(OSError, ValueError):
        lines = read_log(folder / "memory.stat").splitlines()
        told = {name: int(value) for name, value in map(str.split, lines)}
    return sum(told.get(f"total_{name}", told.get(name, 0)) for name in _FILES)
