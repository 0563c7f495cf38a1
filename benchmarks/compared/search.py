"""The search for the setting in which a system is fastest, by trying those that fit its memory.

A comparison counts only against a baseline in its best setting, and that setting depends on memory,
devices and links. So each way of running a system is tried for a few steps, and the fastest one is
kept, together with all that was tried. A way is left out only where another one that fits does no
more work and no more communication.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Way(Protocol):
    """A value that says how a system runs."""

    @property
    def name(self) -> str: ...

    def covers(self, other: Any) -> bool:
        """Whether `other` cannot be faster than this way, where this way fits."""
        ...


W = TypeVar("W", bound=Way)


@dataclass(frozen=True)
class Tried(Generic[W]):
    """A way and its result: seconds of a step, or the error that ended it."""

    way: W
    step_s: float = math.inf
    error: str = ""
    overruns: int = 0

    @property
    def fits(self) -> bool:
        return not self.error

    def __str__(self) -> str:
        return f"{self.way.name}: {self.error or f'{self.step_s:.3f} s a step'}"


@dataclass(frozen=True)
class Found(Generic[W]):
    """All ways that were tried, in order, and the number of those that were left out as covered."""

    tried: tuple[Tried[W], ...]
    covered: int

    @property
    def best(self) -> Tried[W] | None:
        """The fastest way; None if none fits."""
        return min((t for t in self.tried if t.fits), key=lambda t: t.step_s, default=None)

    @property
    def error(self) -> str:
        """The error that explains why no way fits: running out of memory before lost peers."""
        errors = [tried.error for tried in self.tried if tried.error]
        return min(errors, key=lambda error: "OutOfMemory" not in error, default="")

    def __str__(self) -> str:
        fitting = [tried for tried in self.tried if tried.fits]
        ordered = sorted(fitting, key=lambda tried: tried.step_s)
        lines = [f"  {tried}" for tried in ordered]
        failed = [tried.way.name for tried in self.tried if not tried.fits]
        lines += [f"  no room for {'; '.join(failed)}"] if failed else []
        lines += [f"  {self.covered} more ways do at least as much as one of these"]
        return "\n".join(lines)


def fastest(
    ways: Sequence[W],
    try_out: Callable[[W], Tried[W]],
    *,
    every: bool = False,
    thriftiest: W | None = None,
) -> Found[W]:
    """Try `ways` in their order, but for those that a way which fits covers.

    Args:
        try_out: runs a few steps in this way; an error is part of its result.
        every: try covered ways too.
        thriftiest: the way that takes the least memory, where it is doubtful that any fits. It is
            tried first; if it does not fit, no other way is tried.
    """
    tried: list[Tried[W]] = []
    covered = 0
    for way in [*filter(None, [thriftiest]), *(way for way in ways if way != thriftiest)]:
        if not every and any(t.fits and t.way.covers(way) for t in tried):
            covered += 1
            continue
        tried.append(try_out(way))
        print(f"tried {tried[-1]}", file=sys.stderr, flush=True)
        if way == thriftiest and not tried[-1].fits:
            break
    return Found(tuple(tried), covered)
