"""Line-wise forwarding of processes' output, so lines of several never mix."""

from __future__ import annotations

import io
import subprocess
import threading
from collections.abc import Callable
from typing import IO

DRAIN_S = 2.0  # time to read pipes left open after a process's end


class LineForwarder:
    """Thread reading a process's pipe and passing on each line, without its end, with 1 for stdout
    or 2 for stderr."""

    def __init__(self, pipe: IO[bytes], to: int, take: Callable[[int, str], None]) -> None:
        # A progress bar ends its lines with a carriage return.
        self._text = io.TextIOWrapper(pipe, encoding="utf-8", errors="replace", newline=None)
        self._to, self._take = to, take
        self._thread = threading.Thread(target=self._read, name="gpumix-lines", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._text:
            self._take(self._to, line.rstrip("\n"))

    @classmethod
    def of(
        cls, process: subprocess.Popen[bytes], take: Callable[[int, str], None]
    ) -> list[LineForwarder]:
        """Return readers of all pipes of a process."""
        pipes = ((1, process.stdout), (2, process.stderr))
        return [cls(pipe, to, take) for to, pipe in pipes if pipe is not None]

    def finish(self) -> None:
        """Take the remaining output after the end of the process."""
        self._thread.join(DRAIN_S)
