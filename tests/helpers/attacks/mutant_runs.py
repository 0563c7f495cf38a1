"""The command line on spoilt files, in this process, as far as to where ranks would be started.

`Workers` are processes that do so for long, since each start of Python and torch costs seconds;
who hangs or dies is replaced.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import typer

MEMORY_BYTES = 8 * 2**30  # of a worker; who takes more gets a MemoryError
LIMIT_S = 30.0  # of a processor: this machine may have more to do
PATIENCE = 10.0  # times that by the clock, for who hangs and does nothing
STARTED = "ranks would be started now"


@dataclass(frozen=True)
class Ended:
    """How a command ended, as a process would; `launched`: it came to where ranks are started.
    `seconds` are of a processor."""

    code: int
    out: str
    err: str
    launched: bool
    seconds: float


def run(arguments: Sequence[str], folder: Path) -> Ended:
    """The command line in `folder`, in this process."""
    from gpumix.cli import main

    # As Python opens them: what cannot be encoded is an error in one, and escaped in the other.
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    launched: list[str] = []
    begun, code = time.process_time(), 0
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["gpumix", *arguments]),
        _without_ranks(launched),
    ):
        try:
            main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:  # what Python itself would tell of
            import traceback

            traceback.print_exc(file=err)
            code = 1
    seconds = time.process_time() - begun
    said = []
    for stream in (out, err):
        stream.flush()
        said.append(stream.buffer.getvalue().decode("utf-8", "replace"))  # type: ignore[attr-defined]
    return Ended(code, said[0], said[1], bool(launched), seconds)


@contextlib.contextmanager
def _without_ranks(launched: list[str]) -> Iterator[None]:
    """Instead of ranks, what the first of them does before it meets the others."""
    from gpumix.cli.planning import profile_source
    from gpumix.train.processes.runner import LocalRunner

    def stop(*args: Any, **kwargs: Any) -> Any:
        launched.append(STARTED)
        raise typer.Exit(0)

    def as_first_rank(
        self: LocalRunner, work: Any, cluster: Any, task: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.devices(cluster)
        _open(task)
        stop()

    with (
        mock.patch.object(LocalRunner, "warm_up", lambda self: None),
        mock.patch.object(LocalRunner, "run", as_first_rank),
        mock.patch.object(profile_source, "measure_in_subprocess", stop),
    ):
        yield


def _open(task: Any) -> None:
    """Data and model of a job, with errors told as `train.rank_setup.context.join_run` does."""
    from gpumix.data.sources.open_data import open_data
    from gpumix.hardware.host.environment import cache_folder
    from gpumix.train.checks.job_contents import build_checked_model
    from gpumix.train.processes.error_translation import translate_error
    from gpumix.train.rank_setup.model import check_model_fits_data, get_vocabulary_size

    job = task.job
    try:
        check_model_fits_data(job, task.folder)
        open_data(
            job, task.folder, cache_folder() / "tokens", vocabulary=get_vocabulary_size(job.model)
        )
        build_checked_model(job, task.cluster, task.folder)
    except Exception as error:
        raise translate_error(error, "rank 0") from error


# -- what is wrong with it -------------------------------------------------------------------------


def faults(done: Ended | None, names: Sequence[str]) -> list[str]:
    """Of a command that was given a spoilt file; None is one that did not end.

    Args:
        names: of the files, one of which an error must name.
    """
    if done is None:
        return ["hang"]
    found = []
    if "Traceback (most recent call last)" in done.err + done.out or "a bug in gpumix" in done.err:
        found.append("traceback")
    if done.code not in (0, 2, 3, 4):
        found.append("other exit")
    if done.code in (2, 3, 4) and not is_placed(done.err, names):
        found.append("unplaced")
    return found


def is_placed(err: str, names: Sequence[str]) -> bool:
    """Whether the error names a file, or begins with the argument that it is about."""
    said = err[err.find("gpumix: ") :]
    return said.startswith("gpumix: --") or any(name in said for name in names)


# -- processes -------------------------------------------------------------------------------------


class Worker:
    """A process that runs one command after the other in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str]) -> Ended | None:
        """None: it took too long. A process that dies leaves a code below 0, or its own."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(list(arguments)) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE * LIMIT_S)
        answer = process.stdout.readline() if ready else ""
        if answer:
            return Ended(**json.loads(answer))
        process.kill()
        code = process.wait()
        self._process = None
        if not ready or code == -signal.SIGPROF:
            return None
        return Ended(code, "", "the process died", launched=False, seconds=0.0)

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.folder)],
            env=environment(self.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def environment(folder: Path) -> dict[str, str]:
    """Of a worker, and of a process that must say the same."""
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    return kept | {
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "GPUMIX_ALLOW": "mine",
    }


def clean(folder: Path, kept: Sequence[str]) -> None:
    """Take away what a command has left there."""
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _serve(folder: Path) -> None:
    """Commands come on stdin, how they ended goes to stdout, a line each; nothing else does."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # which ends the process
        done = run(json.loads(line), folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(asdict(done)) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
