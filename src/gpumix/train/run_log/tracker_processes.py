"""Experiment trackers of a run: a process for each, reading the run's files.

No rank talks to a tracker or knows of one. A tracker that is slow, hangs or crashes costs no step
and no device memory, and continues while ranks are lost and restart. The processes are those of
`integrations/trackers`, by name.
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
from gpumix.schema.errors import Interrupted, MachineError, rebuild_error
from gpumix.schema.job.job import Job
from gpumix.schema.job.trackers import Trackers
from gpumix.train.run_log import run_files
from gpumix.train.run_log.terminal import get_stderr_console

MODULE = "gpumix.integrations.trackers"
PACKAGES = {"prometheus": "prometheus_client"}  # where unlike the tracker's name
START_S = 120.0  # to import its library, from a slow disk
END_S = 60.0  # to send the rest


def check_installed(trackers: Trackers) -> None:
    """Check that the library of each tracker is installed.

    Raises:
        MachineError: a library is missing; the message has the command for all.
    """
    missing = [name for name in trackers.named() if find_spec(PACKAGES.get(name, name)) is None]
    if missing:
        raise MachineError(
            f"the job names trackers that are not installed: {', '.join(missing)}",
            where="report_to",
            fix=f'pip install "gpumix[{",".join(missing)}]"',
        )


@contextmanager
def run_trackers(job: Job, *, fresh: bool) -> Iterator[None]:
    """Run the trackers of a run, while it trains in the block.

    Args:
        fresh: the run begins; otherwise it continues, as do its runs in the trackers.

    Raises:
        MachineError: a tracker cannot start.
    """
    beginning = {"job": job.model_dump_json(), "since": time.time() if fresh else 0.0}
    followers = [_TrackerProcess(name, beginning) for name in job.report_to.named()]
    state = "failed"
    try:
        for follower in followers:
            follower.wait_until_ready()
        yield
        state = "finished"
    except (KeyboardInterrupt, Interrupted):
        state = "interrupted"
        raise
    finally:
        for follower in followers:
            follower.say(state)
        deadline = time.monotonic() + END_S
        for follower in followers:
            follower.end(deadline)


class _TrackerProcess:
    """Process of a tracker: receives the run's description, reports readiness, and receives the
    outcome."""

    def __init__(self, name: str, beginning: dict[str, object]) -> None:
        self._name = name
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=tracker_environment(),
            text=True,
        )
        self._write(json.dumps(beginning))

    def wait_until_ready(self) -> None:
        """Wait until the tracker is ready.

        Raises:
            GpumixError: the error reported by the tracker.
            MachineError: no answer.
        """
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], START_S)
        told = self._process.stdout.readline() if heard else ""
        if not told:
            how = "ended" if heard else f"said nothing for {START_S:.0f} s"
            raise MachineError(
                f"tracker '{self._name}' does not start: its process {how}",
                fix=f"leave it out of `report_to`, or try `python -c 'import "
                f"{PACKAGES.get(self._name, self._name)}'`",
            )
        answer = json.loads(told)
        if "error" in answer:
            raise rebuild_error(answer)
        self._ready = True

    def say(self, state: str) -> None:
        """Send the outcome of the run, the last message."""
        self._write(state)
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]

    def end(self, deadline: float) -> None:
        """Wait for the process to end, then kill it. Unsent data is lost; the run is not."""
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            get_stderr_console().print(
                f"tracker '{self._name}' did not take the rest within {END_S:.0f} s and is left; "
                f"the run's {run_files.METRICS} has all of it"
            )
        else:
            if code and self._ready:
                get_stderr_console().print(
                    f"tracker '{self._name}' had died, with exit code {code}"
                )
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()  # type: ignore[union-attr]

    def _write(self, line: str) -> None:
        with suppress(OSError):  # the process has ended, and said so
            self._process.stdin.write(f"{line}\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
