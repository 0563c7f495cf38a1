"""Worker processes, and the one that they are forked from.

The nursery is forked once, on the thread that asks for it, and has no threads of its own: so
workers can be had later, whenever they are needed, without a fork of a process that trains, which
takes long and copies whatever locks its threads hold. A dataset is not pickled: it is there as it
is. Only what goes through a connection is: numbers of samples, and what has no room elsewhere.
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

from gpumix.spec.errors import MachineError

SMALL_BYTES = 2**15  # there is room for them in a connection, whose other end does not read yet

_FORK, _KILL, _END = b"f", b"k", b"e"
_BUSY = (OSError, EOFError)


# This process's ends of connections, which a nursery that is forked must not keep open: the other
# ends would not see that this process is gone.
_ours: set[int] = set()


def can_fork() -> bool:
    """Whether workers can be processes here: fork is safe, and memory shared, on Linux."""
    return sys.platform == "linux"


class Inbox:
    """A worker's end: what is sent to it comes here, and what it answers goes into `connection`.

    It waits for a bell. The kernel takes who writes to a socket to be about to sleep, so it wakes
    the reader on the same core; and a thread that trains, and does not sleep, would wait there for
    the reader to be done. A bell (eventfd) wakes it on a core that is free.
    """

    def __init__(self, connection: Connection, bell: int) -> None:
        self.connection = connection
        self._bell = bell
        self._waiting = select.poll()
        self._waiting.register(bell, select.POLLIN)
        self._waiting.register(connection.fileno(), 0)  # that it is closed is always told

    def receive(self) -> Any:
        """The next message. Raises EOFError once the other end is closed."""
        told = dict(self._waiting.poll())
        if self._bell in told:
            os.eventfd_read(self._bell)
            return self.connection.recv()
        raise EOFError


Work = Callable[[Inbox], None]
"""What a worker does with what is sent to it, until that ends."""


class Worker:
    """One process, the connection to it, and the bell that wakes it."""

    def __init__(self, pid: int, connection: Connection, bell: int) -> None:
        self.pid = pid
        self.connection = connection
        self._bell = bell

    def send(self, message: Any) -> None:
        """To its inbox. Raises OSError if it is gone."""
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
        """The connection."""
        if not self.connection.closed:
            _ours.difference_update((self.connection.fileno(), self._bell))
            self.connection.close()
            os.close(self._bell)


class Nursery:
    """Forks workers.

    Args:
        work: what each of them does; what it refers to is there as it is now.
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
                why=error.strerror or str(error),
                fix="raise `ulimit -u`, free memory, or set `data: {workers: 0}`",
            ) from error
        if self._pid == 0:
            _in_child(lambda: _begun(ours, theirs, work))
        theirs.close()
        self._control = ours
        _ours.add(ours.fileno())

    def fork(self) -> Worker:
        """
        Raises:
            MachineError: the system does not let it.
        """
        ours, theirs, bell = _channel()
        try:
            socket.send_fds(self._control, [_FORK], [theirs.fileno(), bell])
            pid = int(self._control.recv(64))
        except (*_BUSY, ValueError) as error:
            ours.close()
            os.close(bell)
            raise MachineError(
                "the process that starts data workers is gone",
                why="something killed it: the system, where memory ran out",
            ) from error
        finally:
            theirs.close()
        if pid < 0:
            ours.close()
            os.close(bell)
            raise MachineError(
                "a worker process cannot be started",
                why=os.strerror(-pid),
                fix="raise `ulimit -u`, or free memory",
            )
        _ours.update((ours.fileno(), bell))
        return Worker(pid, Connection(ours.detach()), bell)

    def end(self, worker: Worker) -> str:
        """Kill a worker, if it still lives; how it ended."""
        worker.close()
        try:
            self._control.send(_KILL + str(worker.pid).encode())
            status = int(self._control.recv(64))
        except (*_BUSY, ValueError):
            return "it is gone"
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return f"killed by {name}"
        return f"it left with {os.waitstatus_to_exitcode(status)}"

    def close(self) -> None:
        """End all workers."""
        with suppress(OSError):
            self._control.send(_END)
        _ours.discard(self._control.fileno())
        self._control.close()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _channel() -> tuple[socket.socket, socket.socket, int]:
    """Two ends of a connection, and a bell."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return ours, theirs, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
    except OSError as error:
        raise MachineError(
            "a worker process cannot be connected",
            why=error.strerror or str(error),
            fix="raise `ulimit -n`, or have fewer workers: `data: {workers: ...}`",
        ) from error


def _begun(ours: socket.socket, theirs: socket.socket, work: Work) -> None:
    """What a nursery does first."""
    ours.close()
    for fd in _ours:
        os.close(fd)
    _serve(theirs, work)


def _serve(control: socket.socket, work: Work) -> None:
    """The nursery's life."""
    children: set[int] = set()
    while True:
        request, fds, _, _ = socket.recv_fds(control, 64, 2)
        if request in (b"", _END):  # the trainer is gone, or has had enough
            break
        if request.startswith(_FORK):
            answer = _forked(control, work, fds)
            if answer > 0:
                children.add(answer)
        else:
            pid = int(request[1:])
            answer = _ended(pid) if pid in children else 0
            children.discard(pid)
        control.send(str(answer).encode())
    for pid in children:
        _ended(pid)


def _forked(control: socket.socket, work: Work, fds: list[int]) -> int:
    """Its number; below zero the system's why not."""
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid == 0:
        control.close()
        _die_with_parent()
        fd, bell = fds
        _in_child(lambda: work(Inbox(Connection(fd), bell)))
    for fd in fds:
        os.close(fd)
    return pid


def _ended(pid: int) -> int:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return status


def _in_child(life: Callable[[], None]) -> NoReturn:
    """All that a forked process does. Nothing that its parent left to be done at its end is."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the trainer
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # what the parent made stays shared
        life()
        code = 0
    except _BUSY:
        code = 0  # the other end is gone
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def picklable(error: Exception) -> Exception:
    """`error`, or one that says the same and can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def sent(connection: Connection, message: Any) -> None:
    """Sent so that tensors go with their values. `Connection.send` has a pickler of its own, which
    torch teaches to put them into files in /dev/shm."""
    connection.send_bytes(_pickled(message))


def _pickled(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
