"""Runs that only say that they train: what a run writes, by its own log, without one being there.

So the process of trackers can be looked at in a second, and while it works.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpumix.schema.errors import Interrupted
from gpumix.schema.job.job import Job
from gpumix.schema.reading.read import read_job
from gpumix.train.run_figures.writer import RunLog
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import StepRecord
from gpumix.train.run_log.tracker_process import run_trackers
from helpers.runs.jobs import plan_for, write_job

LOSSES = {step: 3.0 / step for step in range(1, 20)}
WHY = "rank 1 was killed"


def job_for(folder: Path, trackers: Any) -> Job:
    return read_job(write_job(folder, report_to=trackers))


@contextmanager
def telling(job: Job, *, done: int = 0) -> Iterator[RunLog]:
    """The log of a run that its trackers follow; it goes on after step `done`."""
    plan = plan_for(job.output_dir.parent / "job.yaml")
    plan.save(job.output_dir / run_files.PLAN)
    with (
        run_trackers(job, fresh=not done),
        RunLog(job.output_dir, plan, job.max_steps, done=done) as log,
    ):
        yield log


def trains(log: RunLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.step(StepRecord(step, LOSSES[step], 1e-3, 0.5, 0.1, 640.0, 64 * step))


def tell_all(job: Job) -> None:
    """A run that starts again from step 2 after it lost steps 3 and 4, is stopped after 5, and goes
    on to 6."""
    try:
        with telling(job) as log:
            trains(log, 1, 4)
            time.sleep(1.0)  # for the trackers to look
            with RunLog(job.output_dir, log.plan, job.max_steps, done=2) as again:
                trains(again, 3, 3)
                again.restart(3, resumed_from=2, kept_in="memory", why=WHY, decided="", seconds=2.0)
                trains(again, 4, 5)
                again.evaluation(5, 1.25)
            raise Interrupted("stopped after step 5")
    except Interrupted:
        pass
    with telling(job, done=5) as log:
        trains(log, 6, 6)


def address_in(text: str) -> str:
    """Of an endpoint, as its tracker tells it; empty before it does."""
    match = re.search(r"http://\S+", text)
    return match.group() if match else ""
