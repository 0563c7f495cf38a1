"""Experiment trackers of a run: one background process for all, reading the run's files.

No rank talks to a tracker or knows of one. A tracker that is slow, hangs or crashes costs no step
and no device memory, and continues while ranks are lost and restart. The process is
`integrations/trackers`.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from gpumix.hardware.host.environment import tracker_environment
from gpumix.schema.errors import Interrupted, MachineError, format_install_command, rebuild_error
from gpumix.schema.job.job import Job
from gpumix.schema.job.trackers import Trackers
from gpumix.schema.reading.yaml_locations import Tree
from gpumix.train.console.terminal import get_stderr_console
from gpumix.train.run_log import run_files

KEY = "report_to"  # of a job
MODULE = "gpumix.integrations.trackers"
PACKAGES = {"prometheus": "prometheus_client"}  # where unlike the tracker's name
START_S = 120.0  # to import all libraries, from a slow disk
END_S = 60.0  # to send the rest
EXIT_S = 5.0  # for the process to end, after END_S at most


def check_installed(trackers: Trackers, places: Tree | None = None) -> None:
    """Check that the library of each tracker is installed.

    Args:
        places: of the job's keys, for errors.

    Raises:
        MachineError: a library is missing; the message has the command for all.
    """
    missing = [name for name in trackers.named() if find_spec(PACKAGES.get(name, name)) is None]
    if missing:
        raise MachineError(
            f"the job names trackers that are not installed: {', '.join(missing)}",
            code="package-missing",
            where=_locate(KEY, places),
            fix=format_install_command(*missing),
        )


@contextmanager
def run_trackers(job: Job, places: Tree | None = None, *, fresh: bool) -> Iterator[None]:
    """Run the trackers of a run, while it trains in the block.

    Args:
        places: of the job's keys, for errors.
        fresh: the run begins; otherwise it continues, as do its runs in the trackers.

    Raises:
        MachineError: a tracker cannot start.
    """
    if not job.report_to.named():
        yield
        return
    process = _TrackerProcess(job, places, since=time.time() if fresh else 0.0)
    state = "failed"
    try:
        process.wait_until_ready()
        yield
        state = "finished"
    except (KeyboardInterrupt, Interrupted):
        state = "interrupted"
        raise
    finally:
        process.end(state)


class _TrackerProcess:
    """Process of the trackers of `job`: receives the run's description, reports readiness, and
    receives the outcome.

    Args:
        places: of the job's keys, for errors.
        since: when the run began; 0 if it continues.
    """

    def __init__(self, job: Job, places: Tree | None, *, since: float) -> None:
        self._places = places
        self._names = list(job.report_to.named())
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=tracker_environment(),
            text=True,
        )
        beginning = {"job": job.model_dump_json(), "since": since, "end_s": END_S}
        self._write(json.dumps(beginning))

    def wait_until_ready(self) -> None:
        """Wait until all trackers are ready.

        Raises:
            GpumixError: the error reported by a tracker.
            MachineError: no answer.
        """
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], START_S)
        told = self._process.stdout.readline() if heard else ""
        if not told:
            how = "ended" if heard else f"said nothing for {START_S:.0f} s"
            libraries = ", ".join(PACKAGES.get(name, name) for name in self._names)
            raise MachineError(
                f"{self._label} cannot start: the background process {how}",
                code="tracker-not-started",
                where=_locate(KEY, self._places),
                fix=f"leave out one by one, or try `python -c 'import {libraries}'`",
            )
        answer = json.loads(told)
        if "error" in answer:
            raise rebuild_error(answer | {"where": _locate(answer["where"], self._places)})
        self._ready = True

    def end(self, state: str) -> None:
        """Report the outcome of the run, wait for the process to end, then kill it. Unsent data is
        lost; the run is not."""
        self._write(state)
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            code = self._process.wait(END_S + EXIT_S if self._ready else 0.0)
        except subprocess.TimeoutExpired:
            if self._ready:
                self._report(f"did not take the rest within {END_S:.0f} s; left out")
        else:
            if code and self._ready:
                self._report(f"died, with exit code {code}")
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()  # type: ignore[union-attr]

    def _report(self, what: str) -> None:
        console = get_stderr_console()
        console.print(f"{self._label}: {what}; {run_files.METRICS} of the run has all values")

    @property
    def _label(self) -> str:
        return f"tracker{'s'[: len(self._names) > 1]} {', '.join(self._names)}"

    def _write(self, line: str) -> None:
        with suppress(OSError):  # the process has ended, and said so
            self._process.stdin.write(f"{line}\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]


def _locate(where: str, places: Tree | None) -> str:
    return places.locate(where) if places is not None else where
