"""Commands that need not start Python: forked from the server of ranks, which has imported what
they would import.

All else is as a user has it: a process in a session of its own, with its own folder, environment,
streams and exit code. What it starts with Python's `-m`, or by a script's name, is forked from it,
and so is the server that its own ranks come from: that is four seconds of processor time less for
each command that trains, and three for each rank that torchrun starts.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import json
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import BufferedWriter, FileIO, TextIOWrapper
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch

from helpers.paths import TESTS
from helpers.processes import rank_server

MODULES = ("gpumix", "torch.distributed.run")
SEED = 67280421310721  # of torch's default generator in a process that has just begun
_CONTEXT = multiprocessing.get_context("forkserver")
_STARTING = threading.Lock()


def is_warm(words: Sequence[str]) -> bool:
    """Whether a command runs a script, or one of the modules that are known here."""
    if len(words) < 2 or words[0] != sys.executable:
        return False
    return words[1].endswith(".py") or (words[1] == "-m" and words[2] in MODULES)


class Command:
    """One that `is_warm`, under way; as of `subprocess.Popen`.

    Args:
        streams: the files that get what it writes to its streams, which may be the same one.
        enters: is called first, where it runs.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        env: Mapping[str, str],
        streams: tuple[Path, Path],
        enters: Callable[[], None] | None = None,
    ) -> None:
        rank_server.warm_up()
        self._words, self._streams = list(words), streams
        files = [str(file) for file in streams]
        args = (self._words, str(folder), dict(env), python_paths(), files, enters)
        self._process = _CONTEXT.Process(target=_become, args=args, daemon=False)
        with _STARTING:
            self._process.start()
            # Who starts another one, in another thread, would look whether this one has ended.
            process._children.discard(self._process)  # type: ignore[attr-defined]
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote, once it has ended; see `wait`."""
        self.wait(timeout)
        out, err = (file.read_text(encoding="utf-8") for file in self._streams)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


@cache
def python_paths() -> list[str]:
    """Where Python finds modules by itself."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ask = "import json, sys; print(json.dumps(sys.path[1:]))"
    found = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, check=True)
    paths: list[str] = json.loads(found.stdout)
    return paths


# -- in the process that was forked ----------------------------------------------------------------


def _become(
    words: list[str],
    folder: str,
    env: dict[str, str],
    paths: list[str],
    files: list[str],
    enters: Callable[[], None] | None,
) -> None:
    os.setsid()
    if enters is not None:
        enters()
    for number, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    for name, module in list(sys.modules.items()):  # a job's own may have the names of tests'
        if (getattr(module, "__file__", None) or "").startswith(str(TESTS)):
            del sys.modules[name]
    fork_what_is_started(paths)
    _run(words[1:], folder, env, paths)


def fork_what_is_started(paths: Sequence[str]) -> None:
    """From now on this process, which was forked from a server of ranks, forks the commands that
    are warm and the servers of ranks that it starts, instead of starting Python.

    Args:
        paths: where Python finds modules by itself, for commands.
    """
    os.close(resource_tracker._resource_tracker._fd)  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    start = util.spawnv_passfds

    def started(path: bytes, args: Sequence[str], passed: Sequence[int]) -> int:
        code = args[-1]
        return _server(code, passed) if forkserver.__name__ in code else start(path, args, passed)

    util.spawnv_passfds = started
    usual, ours = subprocess.Popen, _popen(list(paths))
    for one in list(sys.modules.values()):
        if getattr(one, "__dict__", {}).get("Popen") is usual:
            one.Popen = ours  # type: ignore[attr-defined]


def _run(words: list[str], folder: str, env: Mapping[str, str], paths: list[str]) -> NoReturn:
    """What Python does with these words, from its first line to its end."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    module = words[0] == "-m"
    first = folder if module else str(Path(words[0]).resolve().parent)
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    sys.argv, sys.orig_argv = words[module:], [sys.executable, *words]
    _as_if_new()
    code: Any = 0
    try:
        # What is global there lives on to the end.
        main = sys.modules["__main__"] = ModuleType("__main__")
        if module:
            runpy._run_module_as_main(words[1])
        else:
            script = main.__file__ = str(Path(words[0]).absolute())
            exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code & 0xFF)


def _as_if_new() -> None:
    """Nothing of the process that this one was forked from is its own to end, or to tell; and it
    draws other numbers."""
    signal.set_wakeup_fd(-1)
    _signals_as_usual()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    sys.stdout = TextIOWrapper(BufferedWriter(FileIO(1, "w", closefd=False)), encoding="utf-8")
    sys.stderr = TextIOWrapper(
        BufferedWriter(FileIO(2, "w", closefd=False)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )
    random.seed()
    np.random.seed()
    torch.default_generator.manual_seed(SEED)


def _signals_as_usual() -> None:
    """As in a process that was started: what is ignored stays so."""
    for one in signal.valid_signals():
        if callable(signal.getsignal(one)):
            signal.signal(one, signal.SIG_DFL)


def _forked(run: Callable[[], None], passed: Collection[int], streams: Sequence[int] = ()) -> int:
    """A process with these files beside its streams: its number.

    Args:
        streams: what its first ones are; -1: what they are here.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    number = os.fork()
    if number:
        return number
    try:
        for place, file in enumerate(streams):
            if file != -1:
                os.dup2(file, place)
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
            if file > 2 and file not in (nothing, *passed):
                # Its number stays in use: objects that were here before may close it at any time.
                os.dup2(nothing, file, inheritable=False)
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _server(code: str, passed: Sequence[int]) -> int:
    """A server of ranks, without its imports."""

    def run() -> None:
        _signals_as_usual()
        gc.freeze()
        names: dict[str, Any] = {"__name__": "__main__"}
        with suppress(SystemExit):
            exec(code, names)
        os._exit(0)

    return _forked(run, passed)


def _popen(paths: list[str]) -> type[subprocess.Popen[Any]]:
    """`subprocess.Popen` that forks where Python would be started anew to run a module or a script
    with what is imported here."""
    usual = subprocess.Popen
    told = inspect.signature(usual._execute_child)  # type: ignore[attr-defined]

    class Popen(usual):  # type: ignore[misc, valid-type]
        def _execute_child(self, *given: Any) -> None:
            how = told.bind(self, *given).arguments
            words = [str(word) for word in how["args"]]
            rest = words[2:] if words[1:2] == ["-u"] else words[1:]
            if not is_warm([words[0], *rest]):
                usual._execute_child(self, *given)  # type: ignore[attr-defined]
                return

            begun, begins = os.pipe()

            def run() -> None:
                if how["start_new_session"]:
                    os.setsid()
                os.close(begins)
                env = dict(os.environ) if how["env"] is None else dict(how["env"])
                _run(rest, str(how["cwd"] or Path.cwd()), env, paths)

            streams = [how[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            self.pid = _forked(run, {*how["pass_fds"], begins}, streams)
            os.close(begins)
            os.read(begun, 1)  # its session is there, or it has died
            os.close(begun)
            self._child_created = True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(how[name] for name in pipes))

    return Popen
