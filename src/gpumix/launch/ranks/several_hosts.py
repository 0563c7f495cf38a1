"""Launcher processes on several hosts, over ssh: started, read, stopped and ended.

A host ends its ranks by itself after losing contact, so nothing is left behind whatever happens
here or to the connection; see `launch.orders`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from gpumix.launch.commands import LOST_EXIT_CODE
from gpumix.launch.hosts import HostRanks
from gpumix.launch.orders import HEARTBEAT_S, Order, Orders
from gpumix.launch.ranks.line_forwarding import LineForwarder
from gpumix.schema.errors import EXIT_INTERRUPTED, MachineError, TrainingError
from gpumix.schema.files import open_log

LOOK_S = 0.05
# After a host has failed: time for the others to report, and then to end.
SETTLE_S = 3.0
END_S = 15.0
LAST_LINES = 5


@dataclass(frozen=True)
class HostExit:
    """End of a host: `code` is the exit code of its first rank to fail, None if the host was lost.
    `said` has its last lines of stderr."""

    place: HostRanks
    code: int | None
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchOutcome:
    """End of all hosts; `first` is the host whose failure ended the launch, if any."""

    hosts: tuple[HostExit, ...]
    first: HostExit | None
    interrupted: bool

    @property
    def code(self) -> int:
        if self.first is not None:
            return TrainingError.exit_code if self.first.code is None else self.first.code
        return EXIT_INTERRUPTED if self.interrupted else 0


# Takes the host's name, 1 or 2 for its stdout or stderr, and a line.
LineCallback = Callable[[str, int, str], None]


class _SshProcess:
    """The process of ssh to one host."""

    def __init__(self, place: HostRanks, command: Sequence[str], take: LineCallback) -> None:
        self.place = place
        self._said: deque[str] = deque(maxlen=LAST_LINES)
        self._take = take
        pipe = subprocess.PIPE
        # In its own session: Ctrl-C is for the launcher, which forwards it.
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._lines = LineForwarder.of(self.process, self._heard)

    def _heard(self, to: int, line: str) -> None:
        if to == 2:
            self._said.append(line)
        self._take(self.place.host.name, to, line)

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def tell(self, word: str) -> None:
        with suppress(OSError):  # the host is gone
            assert self.process.stdin is not None
            self.process.stdin.write(f"{word}\n".encode())
            self.process.stdin.flush()

    def kill(self) -> None:
        """Kill a remaining connection; the host ends its ranks by itself."""
        self.process.kill()
        self.process.wait()
        for lines in self._lines:
            lines.finish()

    def ended(self) -> HostExit:
        code = self.process.returncode
        lost = code == LOST_EXIT_CODE or code < 0
        return HostExit(self.place, None if lost else code, tuple(self._said))


def run_on_hosts(
    commands: Mapping[HostRanks, Sequence[str]],
    orders: Orders,
    take: LineCallback,
    *,
    grace_s: float,
) -> LaunchOutcome:
    """Run a command for each host until all have ended, or a failing host ends all."""
    remotes: list[_SshProcess] = []
    try:
        for place, command in commands.items():
            remotes.append(_SshProcess(place, command, take))
        first = _watch(remotes, orders, grace_s)
    finally:
        for remote in remotes:
            remote.kill()
    return LaunchOutcome(
        hosts=tuple(remote.ended() for remote in remotes),
        first=first.ended() if first is not None else None,
        interrupted=orders.given is not Order.CONTINUE,
    )


def _watch(remotes: Sequence[_SshProcess], orders: Orders, grace_s: float) -> _SshProcess | None:
    """Wait for all hosts; return the first to fail, if any failed without an order."""
    first: _SshProcess | None = None
    told, alive_at = Order.CONTINUE, 0.0
    end_at = leave_at = float("inf")
    while any(remote.code is None for remote in remotes):
        now = time.monotonic()
        if now >= alive_at:
            alive_at = now + HEARTBEAT_S
            _send_to_all(remotes, "alive")
        if first is None and not told:
            first = next((remote for remote in remotes if remote.code), None)
            end_at = now + SETTLE_S if first is not None else end_at
        if orders.given > told:
            told = orders.given
            _send_to_all(remotes, "stop" if told is Order.STOP else "end")
            # Hosts themselves end ranks exceeding the grace period.
            leave_at = now + END_S + (grace_s if told is Order.STOP else 0.0)
        if now >= end_at:
            end_at, leave_at = float("inf"), now + END_S
            _send_to_all(remotes, "end")
        if now >= leave_at:
            break
        time.sleep(LOOK_S)
    if first is None and not told:
        first = next((remote for remote in remotes if remote.code), None)
    return first


def _send_to_all(remotes: Sequence[_SshProcess], word: str) -> None:
    for remote in remotes:
        remote.tell(word)


def explain_failure(outcome: LaunchOutcome, logs: Path | None) -> TrainingError | None:
    """Return the error for a failed launch; None without a failed host."""
    first = outcome.first
    if first is None:
        return None
    name, others = first.place.host.name, len(outcome.hosts) - 1
    how = f"{first.place.ranks} left with exit code {first.code}"
    if first.code is None:
        how = f"lost with {first.place.ranks}"
    said = next((line for line in reversed(first.said) if line.strip()), "")
    also = [
        f"{one.place.host.name} left with {one.code}"
        for one in outcome.hosts
        if one.code and one.place != first.place
    ]
    ended = f"; the other {'host was' if others == 1 else f'{others} hosts were'} ended"
    return TrainingError(
        f"{how}{ended if others else ''}",
        code="host-part-ended",
        where=f"host {name}",
        why="; ".join(filter(None, [f"its last line: {said}" if said else "", *also])),
        fix=f"see {logs / name}.log" if logs is not None else "",
    )


class GatheredOutput:
    """Output of all hosts, each line prefixed by its host, and in a file per host.

    Args:
        data: receives the hosts' stdout, instead of stdout.
    """

    def __init__(self, names: Sequence[str], logs: Path | None, data: list[str] | None) -> None:
        self._width = max(map(len, names))
        self._data = data
        self._lock = threading.Lock()
        self._open = ExitStack()
        self._files: dict[str, TextIO] = {}
        if logs is not None:
            try:
                logs.mkdir(parents=True, exist_ok=True)
                for name in names:
                    file = open_log(logs / f"{name}.log")
                    self._files[name] = self._open.enter_context(file)
            except OSError as error:
                raise MachineError(
                    "logs cannot be written",
                    code="logs-not-writable",
                    where=str(logs),
                    why=error.strerror or str(error),
                ) from error

    def take(self, name: str, to: int, line: str) -> None:
        with self._lock:
            if name in self._files:
                self._files[name].write(f"{line}\n")
                self._files[name].flush()
            if to == 1 and self._data is not None:
                self._data.append(line)
                return
            stream = sys.stdout if to == 1 else sys.stderr
            with suppress(OSError):  # the reader may be gone
                stream.write(f"{name:<{self._width}} | {line}\n")
                stream.flush()

    def close(self) -> None:
        self._open.close()
