"""Lines of the user's that make the host wait: for a value of a GPU's, or for what they print."""

from __future__ import annotations

import builtins
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpumix.doctor.function.patches import Patches, calling_line
from gpumix.doctor.function.seen import Site
from gpumix.hardware.runtime import is_gpu

# What makes the host wait for a GPU's value; the size of what comes of the first goes by values.
SIZED = ("nonzero", "argwhere", "masked_select")
VALUES = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__", *SIZED)


def is_shown(file: Any) -> bool:
    """Whether what is printed to `file` goes to stdout or stderr."""
    return any(file is one for one in (None, sys.stdout, sys.stderr))


class Sites(dict[tuple[str, str], list[float]]):
    """Calls and seconds by line and by what it does."""

    def add(self, what: str, seconds: float) -> None:
        one = self.setdefault((calling_line(), what), [0, 0.0])
        one[0] += 1
        one[1] += seconds

    def seen(self) -> tuple[Site, ...]:
        """Most seconds first."""
        found = (Site(place, what, int(n), s) for (place, what), (n, s) in self.items())
        return tuple(sorted(found, key=lambda site: -site.seconds))


@dataclass
class Lines:
    """Counts them from `begin` on.

    Args:
        foreign: whether a tensor lies on a device whose values the host must wait for; tests have
            none.
    """

    foreign: Callable[[Tensor], bool] = lambda tensor: is_gpu(tensor.device)
    syncs: Sites = field(default_factory=Sites)
    writes: Sites = field(default_factory=Sites)
    _printing_now: bool = False

    def install(self, patches: Patches, *, gpu: bool) -> None:
        """Args:
        gpu: whether there is one, whose values are read.
        """
        for name in ("stdout", "stderr"):
            patches.replace(sys, name, lambda stream: _Watched(stream, self))
        patches.replace(builtins, "print", self._printing)
        if gpu:
            for name in VALUES:
                patches.replace(Tensor, name, self._reading(name))
            for name in SIZED:
                patches.replace(torch, name, self._reading(name))

    def begin(self) -> None:
        """Calls count from here."""
        self.syncs.clear()
        self.writes.clear()

    def write(self, stream: Any, text: str) -> Any:
        """What code does beside `print`."""
        if self._printing_now:
            return stream.write(text)
        begun_s = time.perf_counter()
        written = stream.write(text)
        self.writes.add("write", time.perf_counter() - begun_s)
        return written

    def _printing(self, before: Any) -> Any:
        """With the time to put values in words."""

        def printing(*values: Any, file: Any = None, **kwargs: Any) -> None:
            if not is_shown(file):
                return before(*values, file=file, **kwargs)
            begun_s, self._printing_now = time.perf_counter(), True
            try:
                before(*values, file=file, **kwargs)
            finally:
                self._printing_now = False
                self.writes.add("print", time.perf_counter() - begun_s)

        return printing

    def _reading(self, name: str) -> Callable[[Any], Any]:
        def reading(before: Any) -> Any:
            def read(*args: Any, **kwargs: Any) -> Any:
                tensor = args[0] if args else kwargs.get("input")
                if not isinstance(tensor, Tensor) or not self.foreign(tensor):
                    return before(*args, **kwargs)
                begun_s = time.perf_counter()
                result = before(*args, **kwargs)
                self.syncs.add(name, time.perf_counter() - begun_s)
                return result

            return read

        return reading


class _Watched:
    """A stream of text; what is written to it is counted."""

    def __init__(self, stream: Any, lines: Lines) -> None:
        self._stream, self._lines = stream, lines

    def write(self, text: str) -> Any:
        return self._lines.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
