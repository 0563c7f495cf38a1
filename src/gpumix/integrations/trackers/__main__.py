"""Process of a run's trackers: `python -m gpumix.integrations.trackers`, started by
`train/run_log/tracker_process.py`.

Reads the run's description from stdin, in a line, and finally how the run ended; answers on stdout
that all trackers are ready, or why one is not. Each tracker has a thread, which follows the run's
log: the file is the queue. A failing tracker is reported once, and left out.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from threading import Event, Lock, Thread
from typing import IO, Any

from gpumix.hardware.host.environment import lower_cpu_priority
from gpumix.integrations.trackers.follower import Follower, TrackerPosition, lock_position
from gpumix.integrations.trackers.metric_names import convert_line
from gpumix.integrations.trackers.tracker import Numbers, TrackedRun, Tracker
from gpumix.schema.errors import (
    GpumixError,
    InputError,
    MachineError,
    format_in_one_line,
    format_install_command,
)
from gpumix.schema.job.job import Job
from gpumix.schema.plan.plan import Plan
from gpumix.train.run_log import run_files

POLL_INTERVAL_S = 0.5
VANISHED_STATE = "interrupted"  # the end reported for a run whose process vanished

# A tracker's file here has a function `make_tracker(settings, job)`.
TRACKERS_PACKAGE = "gpumix.integrations.trackers"
_preparing = Lock()  # libraries are imported one by one


def main() -> None:
    # Ctrl-C reaches the process group; this process ends after the run.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    lower_cpu_priority()
    with redirect_stdout() as answers:
        given = json.loads(sys.stdin.readline())
        job = Job.model_validate_json(given["job"])
        threads = [TrackerThread(name, job, given["since"]) for name in job.report_to.named()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.prepared.wait()
        errors = [thread.error for thread in threads if thread.error]
        print(json.dumps(errors[0] if errors else {"ready": True}), file=answers, flush=True)
        if not errors:
            state = wait_for_end()
            for thread in threads:
                thread.end(state)
            deadline = time.monotonic() + given["end_s"]
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    say(thread.name, f"did not take the rest within {given['end_s']:.0f} s")
        if any(thread.failed or thread.is_alive() for thread in threads):
            sys.stderr.flush()
            os._exit(0)  # threads of a tracker's library may be stuck


def redirect_stdout() -> IO[str]:
    """Return a handle of the original stdout, and redirect stdout itself to null: libraries print
    there."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    return answers


def wait_for_end() -> str:
    """Return how the run ended, when it has."""
    parent = os.getppid()
    while True:
        heard, _, _ = select.select([sys.stdin], [], [], POLL_INTERVAL_S)
        if heard or os.getppid() != parent:
            return (sys.stdin.readline().strip() if heard else "") or VANISHED_STATE


class TrackerThread(Thread):
    """Thread that makes all calls of a tracker: prepares it, and reports the run to it.

    Attributes:
        prepared: set once the tracker is ready, or cannot start.
        error: why the tracker cannot start, as a dictionary; empty if it can.
        failed: True if the tracker cannot start, or was left out.
    """

    def __init__(self, name: str, job: Job, since: float) -> None:
        super().__init__(name=name, daemon=True)
        self.prepared = Event()
        self.error: dict[str, Any] = {}
        self.failed = False
        self._job, self._since = job, since
        self._ended = Event()
        self._state = ""

    def end(self, state: str) -> None:
        """Report how the run ended, to be passed on after the last lines."""
        self._state = state
        self._ended.set()

    def run(self) -> None:
        done = 0
        try:
            with lock_position(self._job.output_dir, self.name, self._since) as (marks, path):
                tracker = self._prepare()
                self.prepared.set()
                feed = TrackerFeed(self.name, tracker, self._job, marks, path)
                while not self._ended.wait(POLL_INTERVAL_S):
                    feed.forward()
                    done = marks.done
                feed.forward()
                feed.end(self._state)
        except (Exception, SystemExit) as error:
            self.failed = True
            if self.prepared.is_set():
                why = format_in_one_line(error)
                say(self.name, f"left out after step {done}, the run goes on: {why}")
            else:
                self.error = _describe_error(self.name, error)
                self.prepared.set()

    def _prepare(self) -> Tracker:
        with _preparing:
            module = import_module(f"{TRACKERS_PACKAGE}.{self.name}")
            settings = self._job.report_to.named()[self.name]
            tracker: Tracker = module.make_tracker(settings, self._job)
            tracker.prepare()
        return tracker


def _describe_error(name: str, error: BaseException) -> dict[str, Any]:
    if isinstance(error, GpumixError):
        return error.as_dict()
    if isinstance(error, ImportError):
        return MachineError(
            f"tracker '{name}' cannot be imported",
            code="tracker-not-importable",
            where=f"report_to.{name}",
            why=format_in_one_line(error),
            fix=format_install_command(name),
        ).as_dict()
    kind = InputError if isinstance(error, ValueError) else MachineError
    file = error.filename if isinstance(error, OSError) else None
    mend = f"see that {file} can be written, name another" if file else "change what is said"
    return kind(
        f"tracker '{name}' does not start",
        code="tracker-not-started",
        where=f"report_to.{name}",
        why=format_in_one_line(error),
        fix=f"{mend} at `report_to.{name}`, or leave `{name}` out: the run's {run_files.METRICS} "
        "has all that it would be told",
    ).as_dict()


class TrackerFeed:
    """Forwarder of new lines to a tracker, from the first step on."""

    def __init__(
        self, name: str, tracker: Tracker, job: Job, marks: TrackerPosition, path: Path
    ) -> None:
        self._name, self._tracker, self._job = name, tracker, job
        self._marks, self._path = marks, path
        self._follower = Follower(job.output_dir / run_files.METRICS)
        self._begun = False

    def forward(self) -> None:
        """Forward lines written since the last call."""
        done = self._marks.done
        lines = [line for line in self._follower.lines() if self._marks.passes(line)]
        if not lines:
            return
        if not self._begun:
            self._begin(done)
        # Before sending: a value sent twice cannot be taken back.
        self._marks.save(self._path)
        for line in lines:
            for one in convert_line(line):
                if isinstance(one, Numbers):
                    self._tracker.numbers(one)
                else:
                    self._tracker.event(one)
        self._tracker.flush()

    def end(self, state: str) -> None:
        """Report how the run ended, unless it never began."""
        if self._begun:
            self._tracker.end(state)

    def _begin(self, done: int) -> None:
        plan = Plan.load(self._job.output_dir / run_files.PLAN)
        self._marks.run = self._tracker.begin(TrackedRun(self._job, plan, self._marks.run, done))
        self._begun = True
        say(self._name, self._tracker.where)


def say(name: str, what: str) -> None:
    sys.stderr.write(f"tracker {name}: {what}\n")


if __name__ == "__main__":
    main()
