"""Process of a tracker: `python -m gpumix.integrations.trackers NAME`, started by
`train/run_log/tracker_processes.py`.

Reads the run's description from stdin, in a line, and finally how the run ended; answers on stdout
that it is ready, or why not. A failure here is reported once, and the run continues without the
tracker.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from gpumix.hardware.host.environment import lower_cpu_priority
from gpumix.integrations.trackers.follower import Follower, TrackerPosition, lock_position
from gpumix.integrations.trackers.metric_names import convert_line
from gpumix.integrations.trackers.tracker import Numbers, TrackedRun, Tracker
from gpumix.schema.errors import GpumixError, InputError, MachineError, format_in_one_line
from gpumix.schema.job.job import Job
from gpumix.schema.plan.plan import Plan
from gpumix.train.run_log import run_files

POLL_INTERVAL_S = 0.5
VANISHED_STATE = "interrupted"  # the end reported for a run whose process vanished

# A tracker's file here has a function `of(settings, folder)`, which makes it.
TRACKERS_PACKAGE = "gpumix.integrations.trackers"


def main() -> None:
    name = sys.argv[1]
    # Ctrl-C reaches the process group; this process ends after the run.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    lower_cpu_priority()
    with redirect_stdout() as answers, ExitStack() as stack:
        given = json.loads(sys.stdin.readline())
        try:
            job = Job.model_validate_json(given["job"])
            marks, path = stack.enter_context(lock_position(job.output_dir, name, given["since"]))
            tracker: Tracker = import_module(f"{TRACKERS_PACKAGE}.{name}").make_tracker(
                job.report_to.named()[name], job
            )
            tracker.prepare()
        except Exception as error:
            print(json.dumps(_describe_error(name, error)), file=answers, flush=True)
            return
        print(json.dumps({"ready": True}), file=answers, flush=True)
        telling = TrackerFeed(name, tracker, job, marks, path)
        try:
            for state in watch_run():
                telling.tell(state)
        except Exception as error:
            say(
                name,
                f"left out after step {marks.done}, the run goes on: {format_in_one_line(error)}",
            )
            sys.stderr.flush()
            os._exit(0)  # threads of the tracker's library may be stuck


def redirect_stdout() -> IO[str]:
    """Return a handle of the original stdout, and redirect stdout itself to null: libraries print
    there."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    return answers


def _describe_error(name: str, error: Exception) -> dict[str, Any]:
    if isinstance(error, GpumixError):
        return error.as_dict()
    if isinstance(error, ImportError):
        return MachineError(
            f"tracker '{name}' cannot be imported",
            why=format_in_one_line(error),
            fix=f'pip install --upgrade "gpumix[{name}]"',
        ).as_dict()
    kind = InputError if isinstance(error, ValueError) else MachineError
    file = error.filename if isinstance(error, OSError) else None
    mend = f"see that {file} can be written, name another" if file else "change what is said"
    return kind(
        f"tracker '{name}' does not start",
        where=f"report_to.{name}",
        why=format_in_one_line(error),
        fix=f"{mend} at `report_to.{name}`, or leave `{name}` out: the run's {run_files.METRICS} "
        "has all that it would be told",
    ).as_dict()


def watch_run() -> Iterator[str]:
    """Yield "" while the run continues, and finally how it ended."""
    parent = os.getppid()
    while True:
        heard, _, _ = select.select([sys.stdin], [], [], POLL_INTERVAL_S)
        if heard or os.getppid() != parent:
            yield (sys.stdin.readline().strip() if heard else "") or VANISHED_STATE
            return
        yield ""


class TrackerFeed:
    """Forwarder of new lines to a tracker, from the first step on."""

    def __init__(
        self, name: str, tracker: Tracker, job: Job, marks: TrackerPosition, path: Path
    ) -> None:
        self._name, self._tracker, self._job = name, tracker, job
        self._marks, self._path = marks, path
        self._follower = Follower(job.output_dir / run_files.METRICS)
        self._begun = False

    def tell(self, state: str) -> None:
        """Forward lines written since the last call, and the end of the run, if any."""
        done = self._marks.done
        lines = [line for line in self._follower.lines() if self._marks.passes(line)]
        if lines:
            if not self._begun:
                self._begin(done)
            # Before sending: a value sent twice cannot be taken back.
            self._marks.save(self._path)
            for line in lines:
                self._forward_line(line)
            self._tracker.flush()
        if state and self._begun:
            self._tracker.end(state)

    def _begin(self, done: int) -> None:
        plan = Plan.load(self._job.output_dir / run_files.PLAN)
        self._marks.run = self._tracker.begin(TrackedRun(self._job, plan, self._marks.run, done))
        self._begun = True
        say(self._name, self._tracker.where)

    def _forward_line(self, line: dict[str, Any]) -> None:
        for one in convert_line(line):
            if isinstance(one, Numbers):
                self._tracker.numbers(one)
            else:
                self._tracker.event(one)


def say(name: str, what: str) -> None:
    sys.stderr.write(f"tracker {name}: {what}\n")


if __name__ == "__main__":
    main()
