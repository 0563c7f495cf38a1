"""Names of the files in a run's folder."""

from __future__ import annotations

RUN = "run.json"  # the job as understood, and the versions
PROFILE = "profile.json"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
PROGRESS = "progress.json"
TRACE = "trace.json"
REPORT = "report.html"  # made by `gpumix report`
COMPARISON = "comparison.html"  # with another run
CHECKPOINTS = "checkpoints"
COLLECTIVES = "flight-recorder"  # last NCCL operations of the ranks of a failed run
LOCK = ".lock"  # locked by the running process
ID = ".id"  # of the run, naming its copies in memory
AGENTS = ".agents"  # of torchrun, which started it
LESSONS = ".lessons"  # from failures
TRACKERS = ".trackers"  # progress of reports to trackers, and the runs there

ALL = frozenset(value for name, value in list(globals().items()) if name.isupper())
# Folder of these files in a script's output folder, and of the state in each of its checkpoints.
SCRIPT_FOLDER = "gpumix"
