"""The processes of ranks, which a stage tells what to do."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from common import BENCHMARKS
from proof.bench import Bench

STARTED = (sys.executable, "-c", "from proof.rank import main; main()")
FORKED = (sys.executable, str(BENCHMARKS / "gpu_proof.py"), "--rank")


class RankFailed(RuntimeError):
    """A rank failed, died or did not answer; the message has what it said."""


class RankProcess:
    """One rank. A real one is started, for its environment is the driver's from the first line on;
    in a rehearsal it is forked."""

    def __init__(self, bench: Bench, env: Mapping[str, str]) -> None:
        self._bench = bench
        self._said = b""
        self.process = subprocess.Popen(
            FORKED if bench.rehearses else STARTED,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=bench.folder,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **env},
        )

    def tell(self, do: str, **given: Any) -> None:
        """Tell it to do something; `answer` waits for it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((json.dumps({"do": do, "with": given}) + "\n").encode())
            self.process.stdin.flush()
        except OSError as error:
            raise RankFailed(f"a rank is gone: {error}") from error

    def answer(self) -> dict[str, Any]:
        """What came of it.

        Raises:
            RankFailed: it failed, or there is no answer before the stage is about to end.
        """
        line = json.loads(self._line())
        if not line["ok"]:
            raise RankFailed(line["error"])
        value: dict[str, Any] = line["value"]
        return value

    def kill(self) -> None:
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._said:
                if not selector.select(max(0.0, self._bench.left_s - 2.0)):
                    raise RankFailed("a rank did not answer before the stage's end")
                read = os.read(self.process.stdout.fileno(), 2**16)
                if not read:
                    raise RankFailed(f"a rank died with exit code {self.process.poll()}")
                self._said += read
        line, _, self._said = self._said.partition(b"\n")
        return line


class Ranks:
    """Several ranks, who do the same at once."""

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self.processes = list(processes)

    def all(self, do: str, **given: Any) -> list[dict[str, Any]]:
        """Let all do something at once; their answers."""
        for process in self.processes:
            process.tell(do, **given)
        return [process.answer() for process in self.processes]

    def run_on_all(self, do: str, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The same with an argument for each."""
        for process, own in zip(self.processes, given, strict=True):
            process.tell(do, **own)
        return [process.answer() for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


@contextmanager
def started(bench: Bench, environments: Sequence[Mapping[str, str]]) -> Iterator[Ranks]:
    """Ranks that have imported all that they need; they are gone afterwards."""
    ranks = Ranks([RankProcess(bench, env) for env in environments])
    try:
        for process in ranks.processes:
            process.answer()
        yield ranks
    finally:
        ranks.kill()
