"""Launches that run on while a test looks at them, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from helpers.processes.waiting import wait_until
from helpers.runs.jobs import environment, metrics

MARK = "GPUMIX_TEST_MARK"


class Running:
    """`gpumix launch` as a user starts it; every process of it carries a mark of its own.

    Args:
        on: what is written before the command, to run it elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        program: Sequence[str],
        on: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._said = folder / "said"
        env = environment(folder / "cache") | {MARK: self._mark}
        with self._said.open("w") as file:
            self.process = subprocess.Popen(
                [*on, sys.executable, "-m", "gpumix", "launch", *arguments, *program],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._said.read_text(encoding="utf-8")

    def code(self, seconds: float = 60) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hung:\n{self.said}") from None

    def left(self) -> dict[int, str]:
        """Processes that carry the mark, with their commands; the launcher itself among them."""
        found = {}
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and self._mark in (process / "environ").read_text():
                    words = (process / "cmdline").read_text().split("\0")
                    found[int(process.name)] = " ".join(words)
            except (OSError, UnicodeDecodeError):  # it is gone, or somebody else's
                continue
        return found

    def one(self, first: str, holds: str) -> int:
        """The process whose command begins and holds that."""
        left = self.left().items()
        found = [pid for pid, words in left if words.startswith(first) and holds in words]
        assert len(found) == 1, left
        return found[0]

    def wait_until(self, done: Callable[[], bool]) -> None:
        wait_until(done, told=lambda: f"{self.left()}\n{self.said}")

    def wait_for_steps(self, number: int) -> None:
        run = self.folder / "run" / "metrics.jsonl"
        self.wait_until(lambda: run.exists() and len(metrics(run.parent)) >= number)

    def wait_until_nothing_is_left(self) -> None:
        self.wait_until(lambda: not self.left())


@contextmanager
def running(
    folder: Path, *arguments: str, program: Sequence[str], on: Sequence[str] = ()
) -> Iterator[Running]:
    started = Running(folder, arguments, program=program, on=on)
    try:
        yield started
    finally:
        for process in [started.process.pid, *started.left()]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        started.process.wait()
