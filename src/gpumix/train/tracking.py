"""Experiment trackers beside a run: a process for each, which reads what the run writes.

No rank talks to a tracker, or knows of it. So one that is slow, hangs, or brings down its process
costs no step, and takes none of a device's memory; it goes on while ranks are lost and start again.
The processes are those of `integrations/trackers`, by name.
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

from gpumix.hardware.environment import tracker_environment
from gpumix.spec.errors import Interrupted, MachineError, error_from
from gpumix.spec.job import Job
from gpumix.spec.trackers import Trackers
from gpumix.train import run_files
from gpumix.train.terminal import stderr

MODULE = "gpumix.integrations.trackers"
PACKAGES = {"prometheus": "prometheus_client"}  # where it has not the tracker's own name
START_S = 120.0  # to import its library, from a slow disk
END_S = 60.0  # to send the rest


def check_installed(trackers: Trackers) -> None:
    """
    Raises:
        MachineError: a tracker's library is not installed; the message has the line for all.
    """
    missing = [name for name in trackers.named() if find_spec(PACKAGES.get(name, name)) is None]
    if missing:
        raise MachineError(
            f"the job names trackers that are not installed: {', '.join(missing)}",
            where="trackers",
            fix=f'pip install "gpumix[{",".join(missing)}]"',
        )


@contextmanager
def tracked(job: Job, *, fresh: bool) -> Iterator[None]:
    """Have a run's trackers told, while it trains in here.

    Args:
        fresh: the run begins; else it goes on, and so do its runs in the trackers.

    Raises:
        MachineError: a tracker cannot start.
    """
    beginning = {"job": job.model_dump_json(), "since": time.time() if fresh else 0.0}
    followers = [_Follower(name, beginning) for name in job.trackers.named()]
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


class _Follower:
    """A tracker's process: it is told what the run is, says when it is ready, and is told how the
    run ended."""

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
        """
        Raises:
            GpumixError: what it says instead.
            MachineError: it says nothing.
        """
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], START_S)
        told = self._process.stdout.readline() if heard else ""
        if not told:
            how = "ended" if heard else f"said nothing for {START_S:.0f} s"
            raise MachineError(
                f"tracker '{self._name}' does not start: its process {how}",
                fix=f"leave it out of `trackers`, or try `python -c 'import "
                f"{PACKAGES.get(self._name, self._name)}'`",
            )
        answer = json.loads(told)
        if "error" in answer:
            raise error_from(answer)
        self._ready = True

    def say(self, state: str) -> None:
        """How the run ended; no word follows."""
        self._write(state)
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]

    def end(self, deadline: float) -> None:
        """Wait for it. What it has not done by then is lost; the run is not."""
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stderr().print(
                f"tracker '{self._name}' did not take the rest within {END_S:.0f} s and is left; "
                f"the run's {run_files.METRICS} has all of it"
            )
        else:
            if code and self._ready:
                stderr().print(f"tracker '{self._name}' had died, with exit code {code}")
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()  # type: ignore[union-attr]

    def _write(self, line: str) -> None:
        with suppress(OSError):  # it has ended, and said so
            self._process.stdin.write(f"{line}\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
