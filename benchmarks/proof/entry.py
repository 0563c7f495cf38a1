"""One stage in a process of its own, from its first line to its last.

Importing this takes nothing of torch: the command itself never imports it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from proof.lines import STAGE, Lines, Place, Stamp

if TYPE_CHECKING:
    from proof.outcome import Outcome

STARTED_BY = "GPU_PROOF_STARTED_BY"
THREADS = 4  # on the host of a GPU


@dataclass(frozen=True)
class Task:
    """What a stage's process is to do.

    Attributes:
        folder: for the stage's own files.
        limit_s: from its start.
        warm: whether commands that it starts are forked from it, as it was itself.
    """

    stage: str
    place: Place
    folder: Path
    limit_s: float
    stamp: Stamp
    results: Path
    log: Path
    warm: bool = False


def run_forked(task: Task) -> None:
    """The process of a stage that was forked: it leads a session, and the log is its output."""
    os.setsid()
    os.environ[STARTED_BY] = "fork"
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)
    opened = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)
    if task.warm:
        from helpers.processes.warm_commands import fork_what_is_started, python_paths

        fork_what_is_started(python_paths())
    run(task)


def run(task: Task) -> NoReturn:
    """Run the stage, and end the process without what libraries do then: drivers may hang in it."""
    import torch

    from proof.bench import Bench
    from proof.card import first_card

    begun = time.monotonic()
    task.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(task.folder)
    torch.set_num_threads(THREADS if task.place == "gpu" else 1)
    bench = Bench(
        task.stage,
        task.place,
        task.folder,
        begun + task.limit_s,
        Lines(task.results, task.stamp),
        first_card() if task.place == "gpu" else None,
    )
    outcome: Outcome = importlib.import_module(f"proof.{task.stage}").run(bench)
    bench.tell(STAGE, outcome.figures, outcome.bars, error="; ".join(bench.failed))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
