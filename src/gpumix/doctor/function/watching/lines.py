"""Lines of user code making the host wait: for a GPU value, or for printed output."""

from __future__ import annotations

import builtins
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpumix.doctor.function.observations import Site
from gpumix.doctor.function.patches import Patches, find_user_line
from gpumix.hardware.runtime import is_gpu

# Methods making the host wait for a GPU value; results of `SIZE_READS` have a size depending on
# values.
SIZE_READS = ("nonzero", "argwhere", "masked_select")
VALUE_READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__", *SIZE_READS)


def is_standard_stream(file: Any) -> bool:
    """Return whether output to `file` goes to stdout or stderr."""
    return any(file is one for one in (None, sys.stdout, sys.stderr))


class SiteCounts(dict[tuple[str, str], list[float]]):
    """Calls and seconds by line and by operation."""

    def add(self, what: str, seconds: float) -> None:
        one = self.setdefault((find_user_line(), what), [0, 0.0])
        one[0] += 1
        one[1] += seconds

    def seen(self) -> tuple[Site, ...]:
        """Return all sites, most seconds first."""
        found = (Site(place, what, int(n), s) for (place, what), (n, s) in self.items())
        return tuple(sorted(found, key=lambda site: -site.seconds))


@dataclass
class WaitingLines:
    """Counts of waiting lines, starting at `begin`.

    Args:
        foreign: returns whether the host must wait for values of a tensor; replaced in tests
            without a GPU.
    """

    foreign: Callable[[Tensor], bool] = lambda tensor: is_gpu(tensor.device)
    syncs: SiteCounts = field(default_factory=SiteCounts)
    writes: SiteCounts = field(default_factory=SiteCounts)
    _printing_now: bool = False

    def install(self, patches: Patches, *, gpu: bool) -> None:
        """Install the patches; with `gpu`, reads of GPU values are watched too."""
        for name in ("stdout", "stderr"):
            patches.replace(sys, name, lambda stream: _CountingStream(stream, self))
        patches.replace(builtins, "print", self._printing)
        if gpu:
            for name in VALUE_READS:
                patches.replace(Tensor, name, self._reading(name))
            for name in SIZE_READS:
                patches.replace(torch, name, self._reading(name))

    def begin(self) -> None:
        """Restart counting."""
        self.syncs.clear()
        self.writes.clear()

    def write(self, stream: Any, text: str) -> Any:
        """Write to a stream, counting writes outside of `print`."""
        if self._printing_now:
            return stream.write(text)
        begun_s = time.perf_counter()
        written = stream.write(text)
        self.writes.add("write", time.perf_counter() - begun_s)
        return written

    def _printing(self, before: Any) -> Any:
        """Measure `print`, including the formatting of values."""

        def printing(*values: Any, file: Any = None, **kwargs: Any) -> None:
            if not is_standard_stream(file):
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


class _CountingStream:
    """A text stream counting its output."""

    def __init__(self, stream: Any, lines: WaitingLines) -> None:
        self._stream, self._lines = stream, lines

    def write(self, text: str) -> Any:
        return self._lines.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
