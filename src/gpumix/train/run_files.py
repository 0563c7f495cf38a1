"""The names of what a run leaves in its folder."""

from __future__ import annotations

PROFILE = "profile.json"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
PROGRESS = "progress.json"
TRACE = "trace.json"
CHECKPOINTS = "checkpoints"
COLLECTIVES = "flight-recorder"  # what NCCL's ranks did last, of a run that failed
LOCK = ".lock"  # held by the process that runs
AGENTS = ".agents"  # of torchrun, that started it
LESSONS = ".lessons"  # of its failures
TRACKERS = ".trackers"  # how far they are told, and of which runs of theirs

ALL = frozenset(
    {
        PROFILE,
        PLAN,
        METRICS,
        PROGRESS,
        TRACE,
        CHECKPOINTS,
        COLLECTIVES,
        LOCK,
        AGENTS,
        LESSONS,
        TRACKERS,
    }
)
