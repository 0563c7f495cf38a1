"""The names of what a run leaves in its folder, and of what is made of it there."""

from __future__ import annotations

RUN = "run.json"  # the job as it was understood, and the versions
PROFILE = "profile.json"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
PROGRESS = "progress.json"
TRACE = "trace.json"
REPORT = "report.html"  # what `gpumix report` makes of all that
CHECKPOINTS = "checkpoints"
COLLECTIVES = "flight-recorder"  # what NCCL's ranks did last, of a run that failed
LOCK = ".lock"  # held by the process that runs
ID = ".id"  # of the run, by which its copies in memory are known
AGENTS = ".agents"  # of torchrun, that started it
LESSONS = ".lessons"  # of its failures
TRACKERS = ".trackers"  # how far they are told, and of which runs of theirs

OF_SCRIPT = "gpumix"  # the folder of all that, in the one that a script was told to write to

ALL = frozenset(
    {
        RUN,
        PROFILE,
        PLAN,
        METRICS,
        PROGRESS,
        TRACE,
        REPORT,
        CHECKPOINTS,
        COLLECTIVES,
        LOCK,
        ID,
        AGENTS,
        LESSONS,
        TRACKERS,
    }
)
