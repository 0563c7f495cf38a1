"""Worker processes, and their fork server.

The nursery is forked once, on the calling thread, and has no threads of its own. So workers can
start later, at any time, without a fork of the training process, which takes long and copies locks
of its threads. A dataset is inherited, not pickled. Only messages on a connection are pickled:
sample numbers, and values without room elsewhere.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from gpumix.schema.errors import MachineError

SMALL_BYTES = 2**15  # fit into a connection before its other end reads

_FORK, _KILL, _END = b"f", b"k", b"e"
_CONNECTION_ERRORS = (OSError, EOFError)


# This process's ends of connections. A forked nursery must close them, or the other ends would not
# notice the death of this process.
_parent_fds: set[int] = set()


def can_fork() -> bool:
    """Return whether workers can be processes: on Linux, fork is safe and memory shared."""
    return sys.platform == "linux"


class Inbox:
    """A worker's end of a connection: receives messages here, and answers on `connection`.

    It waits for a bell. The kernel expects the writer to a socket to sleep soon, and wakes the
    reader on the writer's core; a training thread does not sleep, and would wait there for the
    reader. A bell (eventfd) wakes the reader on a free core.
    """

    def __init__(self, connection: Connection, bell: int) -> None:
        self.connection = connection
        self._bell = bell
        self._waiting = select.poll()
        self._waiting.register(bell, select.POLLIN)
        self._waiting.register(connection.fileno(), 0)  # no events: a hang-up is always reported

    def receive(self) -> Any:
        """Return the next message. Raises EOFError once the other end is closed."""
        told = dict(self._waiting.poll())
        if self._bell in told:
            os.eventfd_read(self._bell)
            return self.connection.recv()
        raise EOFError


Work = Callable[[Inbox], None]
"""The life of a worker: handles messages until the connection ends."""


class WorkerProcess:
    """A worker process: pid, connection, and a bell for waking."""

    def __init__(self, pid: int, connection: Connection, bell: int) -> None:
        self.pid = pid
        self.connection = connection
        self._bell = bell

    def send(self, message: Any) -> None:
        """Send a message to the worker's inbox. Raises OSError if the worker is gone."""
        if self.connection.closed:
            raise OSError("it is gone")
        pickled = _pickled(message)
        small = len(pickled) <= SMALL_BYTES
        if not small:
            os.eventfd_write(self._bell, 1)
        self.connection.send_bytes(pickled)
        if small:
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close the connection."""
        if not self.connection.closed:
            _parent_fds.difference_update((self.connection.fileno(), self._bell))
            self.connection.close()
            os.close(self._bell)


class ForkServer:
    """A fork server for workers.

    Args:
        work: life of each worker; objects it refers to are inherited in their current state.
    """

    def __init__(self, work: Work) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._pid = os.fork()
        except OSError as error:
            raise MachineError(
                "a worker process cannot be started",
                code="worker-not-started",
                why=error.strerror or str(error),
                fix="raise `ulimit -u`, free memory, or set `data: {num_workers: 0}`",
            ) from error
        if self._pid == 0:
            _run_child(lambda: _run_server(ours, theirs, work))
        theirs.close()
        self._control = ours
        _parent_fds.add(ours.fileno())

    def fork(self) -> WorkerProcess:
        """Start a worker.

        Raises:
            MachineError: the system refuses.
        """
        ours, theirs, bell = _channel()
        try:
            socket.send_fds(self._control, [_FORK], [theirs.fileno(), bell])
            pid = int(self._control.recv(64))
        except (*_CONNECTION_ERRORS, ValueError) as error:
            ours.close()
            os.close(bell)
            raise MachineError(
                "the process that starts data workers is gone",
                code="fork-server-gone",
                why="something killed it: the system, where memory ran out",
            ) from error
        finally:
            theirs.close()
        if pid < 0:
            ours.close()
            os.close(bell)
            raise MachineError(
                "a worker process cannot be started",
                code="worker-not-started",
                why=os.strerror(-pid),
                fix="raise `ulimit -u`, or free memory",
            )
        _parent_fds.update((ours.fileno(), bell))
        return WorkerProcess(pid, Connection(ours.detach()), bell)

    def end(self, worker: WorkerProcess) -> str:
        """Kill a worker, if alive; return how it ended."""
        worker.close()
        try:
            self._control.send(_KILL + str(worker.pid).encode())
            status = int(self._control.recv(64))
        except (*_CONNECTION_ERRORS, ValueError):
            return "it is gone"
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return f"killed by {name}"
        return f"it left with {os.waitstatus_to_exitcode(status)}"

    def close(self) -> None:
        """End all workers."""
        with suppress(OSError):
            self._control.send(_END)
        _parent_fds.discard(self._control.fileno())
        self._control.close()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _channel() -> tuple[socket.socket, socket.socket, int]:
    """Return the two ends of a connection, and a bell."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return ours, theirs, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
    except OSError as error:
        raise MachineError(
            "a worker process cannot be connected",
            code="worker-not-connected",
            why=error.strerror or str(error),
            fix="raise `ulimit -n`, or have fewer workers: `data: {num_workers: ...}`",
        ) from error


def _run_server(ours: socket.socket, theirs: socket.socket, work: Work) -> None:
    """Close inherited connections and serve, as the nursery."""
    ours.close()
    for fd in _parent_fds:
        os.close(fd)
    _serve(theirs, work)


def _serve(control: socket.socket, work: Work) -> None:
    """Serve requests until the trainer ends, then kill the workers left."""
    children: set[int] = set()
    while True:
        request, fds, _, _ = socket.recv_fds(control, 64, 2)
        if request in (b"", _END):  # the trainer is gone, or closes the nursery
            break
        if request.startswith(_FORK):
            answer = _fork_worker(control, work, fds)
            if answer > 0:
                children.add(answer)
        else:
            pid = int(request[1:])
            answer = _kill_worker(pid) if pid in children else 0
            children.discard(pid)
        control.send(str(answer).encode())
    for pid in children:
        _kill_worker(pid)


def _fork_worker(control: socket.socket, work: Work, fds: list[int]) -> int:
    """Fork a worker; return its pid, or the negated errno on failure."""
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid == 0:
        control.close()
        _die_with_parent()
        fd, bell = fds
        _run_child(lambda: work(Inbox(Connection(fd), bell)))
    for fd in fds:
        os.close(fd)
    return pid


def _kill_worker(pid: int) -> int:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return status


def _run_child(life: Callable[[], None]) -> NoReturn:
    """Run `life` and exit, as a forked process: exit handlers of the parent do not run."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # the parent's objects stay shared
        life()
        code = 0
    except _CONNECTION_ERRORS:
        code = 0  # the other end is gone
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def make_picklable(error: Exception) -> Exception:
    """Return `error`, or a picklable error with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def send_message(connection: Connection, message: Any) -> None:
    """Send a message with tensors by value. `Connection.send` has a pickler of its own, in which
    torch registers tensors as files in /dev/shm."""
    connection.send_bytes(_pickled(message))


def _pickled(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
