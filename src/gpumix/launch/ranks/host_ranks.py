"""Ranks of a host: processes started like torchrun's, watched, stopped and ended.

Each has its own session, so that a terminal's Ctrl-C reaches it only by its launcher, and so that
processes started by a rank end with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from gpumix.hardware.host.environment import place_settings, rank_settings
from gpumix.launch.orders import Order, Orders
from gpumix.launch.ranks.line_forwarding import LineForwarder
from gpumix.schema.errors import EXIT_INTERRUPTED, TrainingError

LOOK_S = 0.02
# After a rank has failed: time for the others to notice and report, and then to end.
NOTICE_S = 5.0
END_S = 5.0
_STOP_EXIT_CODES = (0, EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)
GUARD = """
import os, sys
for group in sys.stdin.read().split():
    try:
        os.killpg(int(group), 9)
    except OSError:
        pass
"""


@dataclass(frozen=True)
class HostAssignment:
    """A host's part of a launch: `processes` ranks of `world`, from `first` on, and the rendezvous
    address."""

    first: int
    processes: int
    world: int
    address: str
    port: int

    @property
    def one_host(self) -> bool:
        return self.processes == self.world


class RankProcess(ABC):
    """Process of a rank, in a session of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id, and id of the process group."""

    @property
    @abstractmethod
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the end of a killed process."""

    def signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the rank and all processes of the rank's group."""
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def told(self) -> str:
        """Describe how the rank ended."""
        code = self.code or 0
        if code < 0:
            return f"rank {self.number} was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"rank {self.number} left with exit code {code}"


StartRank = Callable[[int, Mapping[str, str]], RankProcess]
"""Function that starts the rank of a number with an environment."""


class ProgramRank(RankProcess):
    """Rank that runs a program. Output goes to this process's, or line by line to `take`."""

    def __init__(
        self,
        number: int,
        words: Sequence[str],
        env: Mapping[str, str],
        take: Callable[[int, str], None] | None,
    ) -> None:
        super().__init__(number)
        pipe = subprocess.PIPE if take else None
        self.process = subprocess.Popen(
            [sys.executable, *words],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        self._lines = LineForwarder.of(self.process, take) if take is not None else []

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def wait(self) -> None:
        self.process.wait()
        for lines in self._lines:
            lines.finish()


@contextmanager
def start_ranks(
    share: HostAssignment, start: StartRank, *, grace_s: float
) -> Iterator[list[RankProcess]]:
    """Start a host's ranks; ranks end with the block, or with this process in any case."""
    ranks: list[RankProcess] = []
    with _start_guard() as tell:
        try:
            for local in range(share.processes):
                place = place_settings(
                    rank=share.first + local,
                    local_rank=local,
                    local_world=share.processes,
                    world=share.world,
                    address=share.address,
                    port=share.port,
                )
                ranks.append(start(share.first + local, rank_settings(place, grace_s=grace_s)))
                tell(ranks[-1].pid)
            yield ranks
        finally:
            kill_ranks(ranks)


@contextmanager
def _start_guard() -> Iterator[Callable[[int], None]]:
    """Start a guard process taking process groups: a killed launcher cannot end its ranks, but the
    guard does when its pipe closes."""
    words = [sys.executable, "-I", "-S", "-c", GUARD]
    guard = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    pipe = guard.stdin
    assert pipe is not None

    def tell(group: int) -> None:
        pipe.write(f"{group}\n".encode())
        pipe.flush()

    try:
        yield tell
    finally:
        guard.kill()
        guard.wait()
        pipe.close()


def kill_ranks(ranks: Sequence[RankProcess]) -> None:
    for rank in ranks:
        rank.kill()


def wait_for_ranks(
    ranks: Sequence[RankProcess], orders: Orders, *, grace_s: float
) -> tuple[int, str]:
    """Wait for all ranks, or end all; return the exit code of the first to fail, and how it ended.

    Args:
        grace_s: time limit of ranks asked to stop.
    """
    first: RankProcess | None = None
    asked = False
    terminate_at = kill_at = float("inf")
    while any(rank.code is None for rank in ranks):
        now = time.monotonic()
        if first is None and (failed := [rank for rank in ranks if rank.code]) and not asked:
            first, terminate_at, kill_at = failed[0], now + NOTICE_S, now + NOTICE_S + END_S
        if orders.given and not asked:
            asked, kill_at = True, min(kill_at, now + grace_s)
            for rank in ranks:
                rank.signal(signal.SIGINT)
        if now >= terminate_at:
            terminate_at = float("inf")
            for rank in ranks:
                rank.signal(signal.SIGTERM)
        if now >= kill_at or orders.given is Order.END:
            kill_ranks(ranks)
        time.sleep(LOOK_S)
    return _outcome(ranks, first, asked=asked)


def _outcome(
    ranks: Sequence[RankProcess], first: RankProcess | None, *, asked: bool
) -> tuple[int, str]:
    if asked and first is None:
        first = next((r for r in ranks if r.code not in _STOP_EXIT_CODES), None)
        if first is None:
            return EXIT_INTERRUPTED, "interrupted"
    first = first or next((rank for rank in ranks if rank.code), None)
    if first is None:
        return 0, ""
    code = first.code or 0
    return (TrainingError.exit_code if code < 0 else code), first.told()
