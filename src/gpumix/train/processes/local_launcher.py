"""Launcher of a run's ranks on this host: starts and watches ranks, and explains failures.

Ranks are forked from a server process that has imported torch once, so four start in a tenth of a
second. The parent owns the rendezvous store, on loopback, so it survives any rank.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from gpumix.data.core.read_policy import NO_SAMPLE, NOTHING_READ, read_shared_note, share_note_in
from gpumix.engine.comm.hang_attribution import drop_unknown, find_blocking_ranks
from gpumix.engine.comm.heartbeat import (
    CHECK_INTERVAL_S,
    STOPPED_TIMEOUT_S,
    SilenceDetector,
    parse_heartbeat,
)
from gpumix.hardware.host.environment import count_gpus_by_nvml, is_stopped
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import DeviceFailure, GpumixError, Interrupted, RankInterrupted, RankLost
from gpumix.schema.files import (
    make_process_scratch,
    make_scratch_folder,
    open_lock_file,
    write_bytes,
)
from gpumix.train.console.terminal import show_waiting
from gpumix.train.processes.error_translation import translate_error
from gpumix.train.processes.spare_fork import ensure_running, keep_spare
from gpumix.train.processes.stop_signals import (
    SIGNALS,
    StopRequest,
    asks_immediate_end,
    get_handled_signals,
    handle_signals,
)

LOOPBACK = "127.0.0.1"
# The first optimizer imports torch's compiler in every rank.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "gpumix.train.preload"]
SERVER_ENDED = (
    "the process that ranks are forked from has ended: somebody killed it, or the system ran out "
    "of memory: see `dmesg | tail`"
)
STOPPING = b"gpumix: finishing this step, then saving; Ctrl-C ends it at once, without saving\n"
# After a rank has failed, time for the others to notice and report; and after a rank was lost,
# unnoticed by them.
GRACE_S = 15.0
SHORT_GRACE_S = 0.05
FINALIZERS_S = 1.0
# Time to wait for a killed process: a process blocked by a disk does not end.
KILLED_S = 10.0


@dataclass(frozen=True)
class RankAddress:
    """Identity of a rank: number, device, and connection to its peers.

    `run` separates the keys of several runs in one store. `holds_store`: this process owns the
    store. `one_host`: all ranks are on this host. `stop_asked_at`: see `StopRequest.asked_before`.
    """

    rank: int
    world: int
    device: Device
    port: int
    host: str = LOOPBACK
    run: str = "run"
    holds_store: bool = False
    one_host: bool = True
    stop_asked_at: float | None = None


@dataclass
class StopTime:
    """Time of a request to stop and save a run, by `time.monotonic()`, or None. Kept over several
    launches: restarted ranks have yet to comply."""

    at: float | None = None


# A socket's path has 107 bytes at most.
SOCKET_FOLDER_BYTES = 107 - len("/gpumix-scratch-12345678/listener-12345678")
SHORT_TEMP = Path("/tmp")

Work = Callable[..., Any]


def warm_up(imports: Sequence[str] = (), *, preload: Sequence[str] = PRELOAD) -> None:
    """Start the server of ranks, importing torch and `imports`, in the background. A running server
    is kept; a killed server is replaced by the spare, if there is one."""
    count_gpus_by_nvml()
    # Sockets to the server: a folder of multiprocessing's own would outlive a killed launcher.
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in settings:
        is_short = len(os.fsencode(tempfile.gettempdir())) <= SOCKET_FOLDER_BYTES
        settings["tempdir"] = str(make_process_scratch(None if is_short else SHORT_TEMP))
    modules = [*preload, *imports, "gpumix.train.processes.fork_server_preload"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    with _interrupts_ignored():
        ensure_running()


def launch(
    work: Work,
    devices: Sequence[Device],
    *args: Any,
    debug: bool = False,
    stop: StopTime | None = None,
    silence_s: float = math.inf,
    spare: bool = False,
) -> list[Any]:
    """Run `work(seat, *args)` in one process per device; return the results in rank order.

    Args:
        work: a module-level function; it, its arguments and its result are pickled between this
            process and its own children.
        debug: print the traceback of every error.
        stop: a first Ctrl-C or SIGTERM is answered by the ranks (`StopRequest`) and noted here;
            only a later Ctrl-C ends them. None: the first one does.
        silence_s: time limit of a rank without heartbeats after its first; such a rank is killed. A
            rank whose process is stopped is killed after `STOPPED_TIMEOUT_S`, if shorter.
        spare: keep a spare server of ranks, for callers restarting ranks.

    Raises:
        GpumixError: a rank's own error; of several the cause of the others.
        RankLost: a rank died without reporting, or fell silent.
        RankInterrupted: a rank was asked to end, and not by this process.
        KeyboardInterrupt: the ranks were ended.
    """
    warm_up()
    context = multiprocessing.get_context("forkserver")
    children: list[_RankProcess] = []
    with ExitStack() as held:
        with show_waiting("starting ranks"):  # their server imports torch first
            store, port = held.enter_context(loopback_store())
            notes = held.enter_context(make_scratch_folder())
            held.callback(_end_all, children)
            for rank, device in enumerate(devices):
                asked_at = None if stop is None else stop.at
                seat = RankAddress(rank, len(devices), device, port, stop_asked_at=asked_at)
                mine, theirs = context.Pipe(duplex=False)
                note = notes / str(rank)
                write_bytes(note, NOTHING_READ)
                process = context.Process(
                    target=_run_rank, args=(work, seat, args, theirs, note, debug), daemon=False
                )
                _start(process)
                theirs.close()
                children.append(_RankProcess(seat, process, mine, note))
        with _forward_stops(children, stop):
            return _watch(children, store, silence_s, spare)


def _end_all(children: Sequence[_RankProcess]) -> None:
    for child in children:
        child.kill()
    for child in children:
        child.join()


def _start(process: Any) -> None:
    try:
        process.start()
    except (ConnectionError, EOFError) as error:
        raise RankLost(
            "a rank could not be started",
            code="rank-not-started",
            where=f"host {socket.gethostname()}",
            why=SERVER_ENDED,
            fix="run the same command again, with --resume if a checkpoint was saved",
        ) from error


@contextmanager
def loopback_store() -> Iterator[tuple[Any, int]]:
    """Serve the rendezvous store on a free loopback port."""
    import torch.distributed as dist

    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=os.dup(server.fileno()),
        )
        yield store, port


def _interrupts_ignored() -> AbstractContextManager[None]:
    """Ignore SIGINT and SIGHUP, which reach the whole process group, in processes started in the
    block and their children. Ranks take Ctrl-C once ready for it; their launcher forwards a hangup
    of the terminal."""
    return handle_signals([signal.SIGINT, signal.SIGHUP], signal.SIG_IGN)


def _forward_stops(
    children: list[_RankProcess], stop: StopTime | None
) -> AbstractContextManager[None]:
    """Note the first Ctrl-C or SIGTERM and forward it to `children`; a later Ctrl-C raises
    KeyboardInterrupt, as does the first without `stop`."""

    def take(number: int, frame: FrameType | None) -> None:
        if stop is None or (stop.at is not None and asks_immediate_end(number)):
            raise KeyboardInterrupt
        if stop.at is not None:
            return
        stop.at = time.monotonic()
        os.write(2, STOPPING)  # a handler may interrupt a print
        for child in children:
            child.ask_to_stop()

    return handle_signals(get_handled_signals(), take)


@dataclass
class _RankProcess:
    seat: RankAddress
    process: Any
    pipe: Connection
    note: Path  # of the sample its data reads
    ended: bool = False
    asked_to_stop: bool = field(init=False)
    result: Any = None
    error: GpumixError | None = None

    def name(self) -> str:
        return f"rank {self.seat.rank} (device '{self.seat.device.id}', pid {self.process.pid})"

    @property
    def wait_handles(self) -> tuple[Connection, int]:
        """Handles ready once the rank has sent its last message or has ended. The pipe alone may
        stay open: processes forked by the rank inherit it."""
        return self.pipe, self.process.sentinel

    def collect(self) -> None:
        """Receive the rank's last message, if any: an ended process sends no more, and its message
        is in the pipe."""
        self.ended = True
        try:
            if not self.pipe.poll():
                raise EOFError
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            self.error = self._orphaned() if self._is_alive else self._died(code)
            return
        if kind == "result":
            self.result = value
        else:
            self.error = value

    def _sample(self) -> str:
        """Return the sample being read when the rank ended, by its note."""
        with _mapped(self.note) as memory:
            index, dataset = read_shared_note(memory)
        return "" if index == NO_SAMPLE else f"sample {index} of {dataset}"

    def __post_init__(self) -> None:
        self.asked_to_stop = self.seat.stop_asked_at is not None

    def ask_to_stop(self) -> None:
        self.asked_to_stop = True
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGTERM)

    def end_silent(self, silence_s: float, others: str) -> None:
        """Kill a silent rank, whatever it is doing.

        Args:
            others: where the other ranks are.
        """
        why = f"nothing was heard of it for {silence_s:.0f} s"
        if self.is_stopped:
            why = "its process was stopped (SIGSTOP)"
        self.process.kill()
        self.process.join(KILLED_S)
        self.ended = True
        self.error = self._lost(
            f"{self.name()} stopped answering",
            code="rank-silent",
            why=why + others,
            first="look at its device and its file systems, or, if its host is only busy, give the "
            "job a longer `advanced.timeout`; then ",
            device=self.seat.device,
        )

    @property
    def is_stopped(self) -> bool:
        return not self.ended and is_stopped(self.process.pid)

    @property
    def aborted(self) -> bool:
        """True if the rank aborted, by itself or by a watchdog: NCCL's aborts ranks waiting too
        long."""
        return isinstance(self.error, RankLost) and self.process.exitcode == -signal.SIGABRT

    def blame_stragglers(self, others: Sequence[_RankProcess], told: str) -> None:
        """Attribute the rank's abort to the ranks it waited for, or to none if unknown.

        Args:
            told: the collective waited in, and where the other ranks were.
        """
        assert isinstance(self.error, RankLost)
        if not others:
            self.error = self._lost(
                f"{self.name()} was aborted while it waited",
                code="rank-aborted-waiting",
                why="no device is known to be at fault: the other ranks have come as far as it has"
                + told,
                first="look at the links between the devices, then ",
                device=None,
            )
            return
        names = " and ".join(one.name() for one in others)
        self.error = self._lost(
            f"{names} did not take part",
            code="rank-absent",
            why=f"{self.name()} waited for that until it was aborted (SIGABRT){told}",
            first="look at that device and its driver, then ",
            device=others[0].seat.device if len(others) == 1 else None,
        )

    @property
    def _is_alive(self) -> bool:
        """True if the process is alive although reported as ended: the parent, which would report
        an exit code, is gone."""
        try:
            os.kill(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _orphaned(self) -> RankLost:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        return self._lost(
            f"{self.name()} cannot be watched any more",
            code="rank-not-watched",
            why=SERVER_ENDED,
            first="",
            device=None,
        )

    def _died(self, exit_code: int | None) -> RankLost:
        how, device = f"left with exit code {exit_code}", self.seat.device
        why = "something in it ended the process, such as os._exit or a crash of a library"
        sample, look = self._sample(), "look at that sample, then "
        if exit_code is not None and exit_code < 0:
            how = f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
            if -exit_code in SIGNALS:
                why = ""
            if -exit_code == signal.SIGKILL:
                why = "somebody killed it, or the system ran out of memory: see `dmesg | tail`"
                look = ""  # the sample may have exhausted memory, or be unrelated
        what = f"{self.name()} {how}"
        if not sample or not why:
            return self._lost(what, code="rank-process-ended", why=why, first="", device=device)
        why = f"{why}; {sample} was being read then"
        return self._lost(what, code="rank-process-ended", why=why, first=look, device=device)

    def _lost(
        self, what: str, *, code: str, why: str, first: str, device: Device | None
    ) -> RankLost:
        return RankLost(
            what,
            code=code,
            where=f"host {socket.gethostname()}",
            why=why,
            fix=f"{first}run the same command again, with --resume if a checkpoint was saved",
            device=device.id if device else "",
            device_class=device.device_class if device else "",
        )

    @property
    def died_of_stop(self) -> bool:
        """True if the rank died of the request to stop, not ready to answer: nothing to save
        yet."""
        return self.asked_to_stop and self.process.exitcode == -signal.SIGTERM

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        elif not self.ended and self._is_alive:
            self._orphaned()

    def join(self) -> None:
        """Wait until the killed process has ended."""
        self.process.join(KILLED_S)
        self.pipe.close()


def _mapped(note: Path) -> mmap.mmap:
    descriptor = open_lock_file(note, make=False)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _watch(children: list[_RankProcess], store: Any, silence_s: float, spare: bool) -> list[Any]:
    """Wait for all ranks; after a failure, only as long as the others need to notice."""
    import torch.distributed as dist

    from gpumix.engine.rank_group import report_failure

    run_store = dist.PrefixStore(children[0].seat.run, store)
    lookout = _RankMonitor(children, run_store, silence_s)
    deadline = math.inf
    while waiting := [c for c in children if not c.ended]:
        if spare:
            keep_spare()
        signs = [sign for child in waiting for sign in child.wait_handles]
        ready = wait(signs, max(0.0, min(CHECK_INTERVAL_S, deadline - time.monotonic())))
        silent = lookout.silent()
        speaking = [c for c in waiting if c.seat.rank not in silent]
        others = _describe_positions(run_store, speaking) if silent else ""
        for child in waiting:
            if any(sign in ready for sign in child.wait_handles):
                child.collect()
            elif child.seat.rank in silent:
                child.end_silent(silent[child.seat.rank], others)
            if child.aborted:
                lookout.find_fault(child)
            if child.ended and child.error is not None:
                report_failure(run_store, child.seat.rank, child.error)
                grace_s = SHORT_GRACE_S if isinstance(child.error, RankLost) else GRACE_S
                deadline = min(deadline, time.monotonic() + grace_s)
        if not ready and time.monotonic() >= deadline:
            break
    _raise_cause(children)
    return [child.result for child in children]


class _RankMonitor:
    """Detection of silent ranks and stragglers, by heartbeats and process states.

    A heartbeat needs the GIL, which a call may hold for long, so it may pause for up to
    `silence_s`. A stopped process does nothing, so there is no need to wait for it.
    """

    def __init__(self, children: list[_RankProcess], store: Any, silence_s: float) -> None:
        from gpumix.engine.rank_group import beat_of

        self._children = children
        self._store = store
        self._beat_of = lambda rank: beat_of(store, rank)
        self._looks = [
            SilenceDetector(self._beat_of, len(children), silence_s),
            SilenceDetector(self._stop_of, len(children), min(silence_s, STOPPED_TIMEOUT_S)),
        ]
        self._on = silence_s < math.inf

    def silent(self) -> dict[int, float]:
        """Return the silent ranks, with the minimum duration of silence."""
        looks = self._looks if self._on else []
        return {rank: look.silence_s for look in looks for rank in look.silent()}

    def find_fault(self, child: _RankProcess) -> None:
        """Attribute a waiting rank's abort to the ranks responsible for the delay."""
        living = [one for one in self._children if not one.ended]
        stopped = [one for one in living if one.is_stopped]
        ranks = [one.seat.rank for one in [child, *living]]
        stands = drop_unknown({rank: parse_heartbeat(self._beat_of(rank)) for rank in ranks})
        own = stands.get(child.seat.rank)
        if own is None or not own.waits:
            return
        behind = set(find_blocking_ranks(stands, child.seat.rank))
        for one in () if behind else living:
            behind.update(
                find_blocking_ranks(stands, one.seat.rank) if one.seat.rank in stands else ()
            )
        if child.seat.rank not in behind:
            others = stopped or [self._children[rank] for rank in sorted(behind)]
            told = f", {own.activity}" if own.activity else ""
            child.blame_stragglers(others, told + _describe_positions(self._store, others))

    def _stop_of(self, rank: int) -> str:
        return "stopped" if self._children[rank].is_stopped else ""


def _describe_positions(store: Any, children: Sequence[_RankProcess]) -> str:
    """Return a text on where ranks are, grouped by place."""
    from gpumix.engine.rank_group import request_positions
    from gpumix.engine.sharding.state_dict import join_some_names

    places = request_positions(store, [c.seat.rank for c in children]) if children else {}
    at: dict[str, list[str]] = {}
    for rank, place in places.items():
        at.setdefault(place, []).append(f"rank {rank}")
    return "".join(f"; {join_some_names(ranks)} stood at {place}" for place, ranks in at.items())


def _raise_cause(children: list[_RankProcess]) -> None:
    """Raise the error explaining the others."""
    if any(child.died_of_stop for child in children):
        raise KeyboardInterrupt
    errors = [c.error for c in children if c.error is not None]
    failures = [e for e in errors if isinstance(e, DeviceFailure)]
    failures.sort(key=lambda failure: not failure.device)  # known culprits first
    own = [e for e in errors if type(e).__name__ != "CommunicationError"]
    for error in [*failures, *own, *errors]:
        if isinstance(error, Interrupted) and not any(child.asked_to_stop for child in children):
            raise RankInterrupted(
                f"somebody asked a rank to end: {error.what}",
                code="rank-asked-to-end",
                where=error.where,
                fix=error.fix,
            ) from error
        raise error


def _run_rank(
    work: Work, seat: RankAddress, args: tuple[Any, ...], pipe: Connection, note: Path, debug: bool
) -> None:
    """Run a rank's process, reporting any error to the parent."""
    StopRequest.pending_since = seat.stop_asked_at
    try:
        share_note_in(_mapped(note))
    except FileNotFoundError:  # the launcher was interrupted while starting this process
        os._exit(1)
    os.dup2(2, 1)  # stdout is for the launcher's data; ranks print to stderr
    end_with_launcher()
    try:
        pipe.send(("result", work(seat, *args)))
        pipe.close()
    except BaseException as error:
        if debug and not isinstance(error, Interrupted):
            traceback.print_exc()
        _release_resources()
        told = translate_error(error, f"rank {seat.rank} (device '{seat.device.id}')")
        with suppress(OSError):  # the parent may be gone
            pipe.send(("error", told))
        pipe.close()
        sys.stderr.flush()
        # Threads of a broken process group may hang in destructors; the parent knows everything.
        os._exit(0)


def _release_resources() -> None:
    """Release system resources: libraries make semaphores (tqdm, and so datasets), whose tracker
    warns of leftovers. Hanging finalizers are abandoned."""
    thread = threading.Thread(
        target=util._run_finalizers,  # type: ignore[attr-defined]
        args=(0,),
        daemon=True,
    )
    thread.start()
    thread.join(FINALIZERS_S)


def end_with_launcher() -> None:
    """Let this process end with its launcher: a killed launcher cannot end ranks. On Linux the
    kernel does so, even for a stopped process or a call holding the GIL."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        alive = launcher.sentinel  # a pipe, whose other end belongs to the launcher
        fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
        if wait([alive], 0):  # the launcher has ended before
            os._exit(1)
        return
    threading.Thread(target=_end_after, args=(launcher,), name="gpumix-orphan", daemon=True).start()


def _end_after(launcher: Any) -> None:
    launcher.join()
    os._exit(1)
