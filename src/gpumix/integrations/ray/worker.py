"""A worker of a Ray cluster as a rank: runs `gpumix train` in a subprocess, or a function in its
own process.

A job has a subprocess because it handles signals, and restarts itself after some failures.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpumix.hardware.host.environment import place_settings, use_settings
from gpumix.integrations.ray.placement import RankPlace, WorkerReport
from gpumix.integrations.trackers.follower import Follower
from gpumix.schema.errors import InputError

OUTPUT_TAIL_LINES = 8
SHUTDOWN_TIMEOUT_S = 30.0  # for a rank's last checkpoint, after the request to end


@dataclass(frozen=True)
class ProcessState:
    """State of a rank's process.

    Attributes:
        code: its exit code; None while it runs.
        told: the JSON document that it printed; None without any.
        said: its last lines to people.
        metrics: events noted by the run since the last look.
    """

    code: int | None
    told: Any = None
    said: str = ""
    metrics: tuple[dict[str, Any], ...] = ()


class RayRank:
    """Base of both kinds of workers: reports its place."""

    def arrived(self) -> WorkerReport:
        import ray

        context = ray.get_runtime_context()
        return WorkerReport(
            node=context.get_node_id(),
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            gpus=tuple(map(str, context.get_accelerator_ids().get("GPU", ()))),
        )

    def free_port(self, address: str) -> int:
        """Return a free port of this host, for the rendezvous of ranks."""
        with socket.socket() as free:
            free.bind((address, 0))
            return int(free.getsockname()[1])


class FunctionRank(RayRank):
    """Rank calling a function."""

    def call(self, place: RankPlace, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        use_settings(place_settings(**asdict(place)))
        return function(*args)


class JobRank(RayRank):
    """Rank running `gpumix` with given arguments."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        self._said: deque[str] = deque(maxlen=OUTPUT_TAIL_LINES)
        self._listener: threading.Thread | None = None
        self._metrics: Follower | None = None

    def begin(
        self, place: RankPlace, arguments: Sequence[str], folder: str, metrics: str | None
    ) -> None:
        """Start the process.

        Args:
            folder: base of relative paths.
            metrics: the file that the run writes, if this rank reports it.

        Raises:
            InputError: this host does not have the folder.
        """
        if not Path(folder).is_dir():
            raise InputError(
                f"the folder {folder} is not there",
                code="folder-not-on-worker",
                where=f"rank {place.rank} on {socket.gethostname()}",
                why="ranks read the job and its data, and write the run, where all hosts see it",
                fix="start from a folder of a file system that all nodes of the cluster share",
            )
        if metrics is not None:
            self._metrics = Follower(Path(folder, metrics))
            deque(self._metrics.lines(), maxlen=0)  # of an earlier run
        use_settings(place_settings(**asdict(place)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpumix", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.PIPE,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def look(self) -> ProcessState:
        assert self._process is not None
        code = self._process.poll()
        metrics = () if self._metrics is None else tuple(self._metrics.lines())
        if code is None:
            return ProcessState(None, metrics=metrics)
        self._out.seek(0)
        lines = self._out.read().decode(errors="replace").strip().splitlines()
        told = None
        with suppress(ValueError, IndexError):
            told = json.loads(lines[-1])
        if self._listener is not None:
            self._listener.join(timeout=1.0)
        return ProcessState(code, told, "\n".join(self._said), metrics)

    def interrupt(self) -> None:
        """Ask the rank to save and to end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # not by SIGINT: Ray blocks it in all its processes

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        """Forward the process's output to Ray's logs."""
        assert self._process is not None and self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace")
            self._said.append(text.rstrip())
            sys.stderr.write(text)


def select_numbers(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of metrics."""
    return {
        name: value
        for name, value in event.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
