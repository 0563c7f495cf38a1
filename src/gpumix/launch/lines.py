"""Carries what processes print, line by line, so that lines of several never mix."""

from __future__ import annotations

import io
import subprocess
import threading
from collections.abc import Callable
from typing import IO

LEFT_S = 2.0  # how long what a process left open is read after its end


class Lines:
    """Reads a process's pipe in a thread of its own and hands on each line, without its end, with 1
    or 2: whether it was meant for stdout or stderr."""

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
    def of(cls, process: subprocess.Popen[bytes], take: Callable[[int, str], None]) -> list[Lines]:
        """Of all pipes of a process."""
        pipes = ((1, process.stdout), (2, process.stderr))
        return [cls(pipe, to, take) for to, pipe in pipes if pipe is not None]

    def finish(self) -> None:
        """After the end of the process: what it has printed is taken."""
        self._thread.join(LEFT_S)
