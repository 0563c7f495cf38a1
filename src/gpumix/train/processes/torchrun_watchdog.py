"""Monitoring of ranks under torchrun, since agents notice only ended processes.

The other ranks would notice a stopped rank, or a frozen or disconnected host, only when their
collectives time out. So the first rank of each host that is not stopped itself looks for both, from
a thread. A missing heartbeat is not enough: it needs the GIL, which a call may hold for long. So a
rank of this host counts as lost when its process is stopped. Another host counts as lost when its
heartbeat pauses and its system does not answer either, or reports the process gone: its agent may
be gone too. The store needs no GIL in its own process: if it does not answer, that process is
stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch.distributed as dist

from gpumix.engine.comm.heartbeat import CHECK_INTERVAL_S, STOPPED_TIMEOUT_S, SilenceDetector
from gpumix.engine.comm.thread_shutdown import join_threads
from gpumix.engine.rank_group import STORE_ERRORS, beat_of, report_failure, store_gone
from gpumix.hardware.host.environment import is_stopped, read_start_time
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import GpumixError, RankLost, get_first_line
from gpumix.train.processes.local_launcher import RankAddress
from gpumix.train.processes.store import connect_store
from gpumix.train.processes.tcp_connections import Presence, WatchedConnection
from gpumix.train.processes.torchrun_runner import Arrival

# Time for a rank whose store is gone to report it itself.
SELF_REPORT_S = 10.0
ANSWER_S = 5.0
MOST_CONCURRENT_PROBES = 64  # hosts at once


class TorchrunWatchdog:
    """Monitor running during its `with` block.

    Args:
        arrivals: of all ranks; `devices` are theirs.
        tell: called with an error before it ends this process.
    """

    def __init__(
        self,
        seat: RankAddress,
        arrivals: Sequence[Arrival],
        devices: Sequence[Device],
        tell: Callable[[GpumixError], None],
    ) -> None:
        self._seat = seat
        self._arrivals = arrivals
        self._devices = devices
        self._tell = tell
        own = arrivals[seat.rank].host
        self._here = [rank for rank, one in enumerate(arrivals) if one.host == own]
        every = dict.fromkeys(one.host for one in arrivals)
        first = {host: [one.host for one in arrivals].index(host) for host in every}
        self._lines = {
            rank: WatchedConnection(arrivals[rank].address, arrivals[rank].port)
            for host, rank in first.items()
            if host != own
        }
        self._elsewhere = list(self._lines)
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._looks = 0

    def __enter__(self) -> TorchrunWatchdog:
        for work in (self._run, self._watch_store) if self._seat.world > 1 else ():
            thread = threading.Thread(target=work, name="gpumix-lookout", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        join_threads(self._threads)
        for line in self._lines.values():
            line.close()

    def _run(self) -> None:
        try:
            self._look(connect_store(self._seat, STOPPED_TIMEOUT_S))
        except (GpumixError, *STORE_ERRORS) as gone:
            if not self._over.wait(SELF_REPORT_S):
                self._end_without_store(get_first_line(gone))

    def _watch_store(self) -> None:
        """Check that the store still answers `_look`."""
        pulse = SilenceDetector(lambda _: str(self._looks), 1, STOPPED_TIMEOUT_S)
        while not self._over.wait(CHECK_INTERVAL_S):
            if pulse.silent():
                self._end_without_store(f"it has not answered for {STOPPED_TIMEOUT_S:.0f} s")

    def _end_without_store(self, why: str) -> None:
        """End this process: the store is gone, or its host is cut off, perhaps with more hosts."""
        found = self._probe_ranks(self._elsewhere)
        mute = {rank: what for rank, what in found.items() if what == "without answer"}
        own = self._name(self._seat.rank)
        self._end(self._lost(mute) if mute else store_gone(own, why))

    def _look(self, store: dist.Store) -> None:
        stops = SilenceDetector(self._stop_of, self._seat.world, STOPPED_TIMEOUT_S)
        hosts = SilenceDetector(
            lambda n: beat_of(store, self._elsewhere[n]), len(self._elsewhere), STOPPED_TIMEOUT_S
        )
        while not self._over.wait(CHECK_INTERVAL_S):
            self._looks += 1
            stopped, silent = stops.silent(), [self._elsewhere[n] for n in hosts.silent()]
            running = [rank for rank in self._here if rank not in stopped]
            if running[0] != self._seat.rank:
                continue
            for rank in stopped:
                self._end_stopped(store, rank)
            found = self._probe_ranks(silent)
            lost = {rank: what for rank, what in found.items() if what != "there"}
            if lost and not self._over.is_set():
                error = self._lost(lost)
                with suppress(*STORE_ERRORS):
                    report_failure(store, self._seat.rank, error)
                self._end(error)

    def _stop_of(self, rank: int) -> str:
        one = self._arrivals[rank]
        # In a container of an equal host name the process may be a different one.
        here = rank in self._here and read_start_time(one.process) == one.begun
        return "stopped" if here and is_stopped(one.process) else ""

    def _probe_ranks(self, ranks: Sequence[int]) -> dict[int, Presence]:
        """Return the presence of the ranks' processes, asking many at once: each may take
        `ANSWER_S`."""
        with ThreadPoolExecutor(MOST_CONCURRENT_PROBES) as pool:
            return dict(zip(ranks, pool.map(self._probe_rank, ranks)))

    def _probe_rank(self, rank: int) -> Presence:
        self._looks += 1
        return self._lines[rank].look(within_s=ANSWER_S) if self._arrivals[rank].port else "there"

    def _end_stopped(self, store: dist.Store, rank: int) -> None:
        """Kill a stopped rank, to be restarted by the agent."""
        error = RankLost(
            f"{self._name(rank)} stopped answering",
            code="rank-silent",
            where=f"host {self._arrivals[rank].host}",
            why="its process was stopped (SIGSTOP)",
            fix="look at its device and its file systems, then run the same command again",
            device=self._devices[rank].id,
            device_class=self._devices[rank].device_class,
        )
        report_failure(store, rank, error)
        _print_error(error)
        with suppress(ProcessLookupError):
            os.kill(self._arrivals[rank].process, signal.SIGKILL)

    def _lost(self, ranks: Mapping[int, Presence]) -> RankLost:
        """Return the error for lost hosts, given by the hosts' first ranks."""
        only = self._devices[next(iter(ranks))] if len(ranks) == 1 else None
        told = {
            "gone": "the system of host {0.host} ({0.address}) says that the process is gone",
            "without answer": "host {0.host} ({0.address}) does not answer",
        }
        every = [told[what].format(self._arrivals[rank]) for rank, what in ranks.items()]
        return RankLost(
            f"{' and '.join(map(self._name, ranks))} stopped answering",
            code="rank-silent",
            where=self._name(self._seat.rank),
            why=f"nothing was heard of it for {STOPPED_TIMEOUT_S:.0f} s, and {' and '.join(every)}",
            fix="look at that host and the link to it; then run the same command with --resume",
            device=only.id if only else "",
            device_class=only.device_class if only else "",
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} (device '{self._devices[rank].id}' on {self._arrivals[rank].host})"

    def _end(self, error: GpumixError) -> None:
        """End this process regardless of the main thread, which may wait forever."""
        self._tell(error)
        _print_error(error)
        os._exit(error.exit_code)


def _print_error(error: GpumixError) -> None:
    sys.stderr.write(f"gpumix: {error}\n")
    sys.stderr.flush()
