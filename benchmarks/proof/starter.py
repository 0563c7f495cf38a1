"""Processes of stages: forked from one server that has imported what they need, or started."""

from __future__ import annotations

import base64
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Protocol

from common import BENCHMARKS, TESTS
from proof.entry import Task, run_forked
from proof.lines import Place, Stamp
from proof.stages import Stage

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "gpumix.train.preload")
MODULES = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils", "proof.preload")
SOURCE = BENCHMARKS.parent / "src"
ENDS_S = 3.0  # how long a group may take to end after SIGTERM
IMPORTS_S = 90.0  # how long the server may import before stages are started instead
LOOK_S = 0.05


class StageProcess(Protocol):
    """A process that leads a group."""

    pid: int

    def poll(self) -> int | None: ...


class Starter:
    """Runs stages in processes of their own.

    Attributes:
        forks: whether they are forked from one server, which spares each of them all imports.
    """

    def __init__(self, place: Place, stamp: Stamp, *, forks: bool = True) -> None:
        self.place, self.stamp, self.forks = place, stamp, forks
        self._owns_server = forks
        paths = [*map(str, (BENCHMARKS, TESTS, SOURCE)), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(paths)))
        if forks:
            self._begin_server()

    def run(self, stage: Stage, results: Path, log: Path, folder: Path, limit_s: float) -> str:
        """Run a stage, and end all of its processes.

        Returns:
            What went wrong with its process; empty if it ended by itself and well.
        """
        warm = self.forks and stage.commands
        task = Task(stage.name, self.place, folder, limit_s, self.stamp, results, log, warm=warm)
        process = self._started(task)
        if process is None:
            return "its process could not be started"
        deadline = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        code = process.poll()
        end_group(process.pid, process.poll)
        if code is None:
            return f"ended at its limit of {limit_s:.0f} s"
        return "" if code == 0 else f"its process ended with exit code {code}"

    def close(self) -> None:
        """End the server, whose own end would take seconds."""
        server: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if self._owns_server and server is not None:
            with suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)

    def _begin_server(self) -> None:
        from gpumix.train.processes.local_launcher import warm_up

        warm_up(MODULES, preload=PRELOAD)

    def _started(self, task: Task) -> StageProcess | None:
        if self.forks:
            process = _forked(task)
            if process is not None:
                return process
            self.forks = False
        return _executed(task)


class _Forked:
    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code


def _forked(task: Task) -> StageProcess | None:
    """None where the server does not answer in time."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run_forked, args=(task,), daemon=False)

    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(IMPORTS_S))
    try:
        process.start()
    except (TimeoutError, OSError, EOFError):
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return _Forked(process)


def _executed(task: Task) -> StageProcess | None:
    program = BENCHMARKS / "gpu_proof.py"
    packed = base64.b64encode(pickle.dumps(replace(task, warm=False))).decode()
    with task.log.open("ab") as log:
        try:
            return subprocess.Popen(
                [sys.executable, str(program), "--task", packed],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError:
            return None


def end_group(group: int, poll: Callable[[], int | None]) -> None:
    """End all processes of a group: SIGTERM, and after 3 s SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        if poll() is None:  # it may not lead its group yet
            with suppress(ProcessLookupError, PermissionError):
                os.kill(group, number)
        deadline = time.monotonic() + ENDS_S
        while time.monotonic() < deadline:
            if poll() is not None and not any(members(group)):
                return
            time.sleep(LOOK_S)


def members(group: int) -> Iterator[int]:
    """The processes of a group; what has ended and waits to be asked for is none."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                state, _, of, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(of) == group and state not in "ZX":
                    yield int(folder.name)


def processes_on_gpu(place: Place) -> str:
    """What the driver says is on the GPU; empty where there is nothing, or nobody to ask."""
    if place != "gpu":
        return ""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(done.stdout.split("\n")).strip("; ") if done.returncode == 0 else ""
