"""Contents of a run's folder: plan, profile, records and progress."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from gpumix.schema.errors import InputError
from gpumix.schema.files import MARK_BYTES, read_text
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.step_trace import Trace
from gpumix.schema.profile.profile import Profile
from gpumix.train.checkpoint.checkpoint_folder import list_checkpoints
from gpumix.train.checkpoint.manifest import parse_step
from gpumix.train.checks.output_folder import is_locked
from gpumix.train.run_figures.advice import Advice, AdvisedRun, advise
from gpumix.train.run_figures.figures import RunFigures
from gpumix.train.run_figures.history import (
    History,
    load_history,
    make_unreadable_error,
    parse_number,
)
from gpumix.train.run_figures.words import describe_model, format_large
from gpumix.train.run_log import run_files
from gpumix.train.run_manifest import RunRecord

State = Literal["planned", "training", "restarting", "interrupted", "failed", "finished"]
LIVE: tuple[State, ...] = ("training", "restarting")

OTHER_FOLDER_FIX = (
    "give the folder of another run; in this one it is written anew when the run goes on"
)
# Written next to the plan by `gpumix plan --output plan.json`.
BESIDE_PLAN = "plan.profile.json"
JOB = "job.yaml"  # in commands: the name of the job's file is not recorded


@dataclass(frozen=True)
class Progress:
    """Contents of `progress.json`; `heard_at` is the time of writing (`time.time()`)."""

    state: State
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    why: str = ""
    heard_at: float | None = None

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def ended_early(self) -> bool:
        """Whether a script ended before its planned steps."""
        return self.state == "finished" and self.steps is not None and self.step < self.steps

    def silent_s(self) -> float:
        """Return the seconds since the run's last report."""
        return max(0.0, time.time() - self.heard_at) if self.heard_at else 0.0


@dataclass(frozen=True)
class Run:
    """All contents of a run's folder. `checkpoints` lists existing checkpoints, newest first."""

    folder: Path
    plan: Plan
    profile: Profile | None
    record: RunRecord | None
    progress: Progress
    history: History
    trace: Trace | None
    checkpoints: tuple[tuple[int, str], ...]

    @property
    def name(self) -> str:
        """The name of the output folder; of a script's run, the folder that the script names."""
        folder = self.folder.resolve()
        return folder.parent.name if folder.name == run_files.SCRIPT_FOLDER else folder.name

    @cached_property
    def model(self) -> str:
        """The model's name and size, as far as known."""
        parameters = None if self.profile is None else self.profile.model.parameters
        job = {} if self.record is None else self.record.job
        model = job.get("model")
        if isinstance(model, dict):
            return describe_model(model, parameters)
        return "" if parameters is None else f"{format_large(parameters)} parameters"

    @cached_property
    def figures(self) -> RunFigures:
        progress = self.progress
        steps = progress.step if progress.state == "finished" else progress.steps
        return RunFigures(self.history, self.plan, steps)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What to do next."""
        progress, of_job = self.progress, self.record is None or self.record.script is None
        plan = shlex.quote(str(self.folder / run_files.PLAN))
        return advise(
            AdvisedRun(
                self.figures,
                state=progress.state,
                why=progress.why,
                resumable=bool(self.checkpoints),
                job=JOB if of_job else "",
                plan_file=plan,
            )
        )


def read_run(folder: Path, *, newest_bytes: int | None = None) -> Run:
    """Read the run in `folder`, or the run of the script with this output folder.

    Args:
        newest_bytes: read only the newest part of the metrics, see `load_history`, and no trace,
            for repeated reading.

    Raises:
        InputError: there is no run, or a file is unreadable or of another schema.
    """
    folder = _find_run_folder(folder)
    plan = Plan.load(folder / run_files.PLAN, fix=OTHER_FOLDER_FIX)
    trace = folder / run_files.TRACE
    return Run(
        folder=folder,
        plan=plan,
        profile=_load_profile(folder, plan),
        record=_load_record(folder),
        progress=_read_progress(folder / run_files.PROGRESS),
        history=load_history(folder, newest_bytes=newest_bytes),
        trace=Trace.load(trace) if newest_bytes is None and trace.exists() else None,
        checkpoints=tuple(_list_checkpoints(folder)),
    )


def is_measuring(folder: Path) -> bool:
    """Return whether a run has started and has no plan yet: devices are measured."""
    has_plan = any((one / run_files.PLAN).exists() for one in _possible_folders(folder))
    return not has_plan and is_locked(folder)


def _possible_folders(folder: Path) -> tuple[Path, Path]:
    return folder, folder / run_files.SCRIPT_FOLDER


def _find_run_folder(folder: Path) -> Path:
    for one in _possible_folders(folder):
        if (one / run_files.PLAN).exists():
            return one
    why = f"there is no {run_files.PLAN} in it"
    if not folder.exists():
        why = "there is nothing of this name"
    elif not folder.is_dir():
        why = "it is a file"
    elif (folder / run_files.LOCK).exists() and not (folder / run_files.METRICS).exists():
        why = "it has no plan yet: devices are still measured, or that failed"
    raise InputError(
        "this is no run",
        code="not-a-run",
        where=str(folder),
        why=why,
        fix="give the `output_dir` of a job that was trained, such as runs/first, or the folder "
        "that a script wrote to",
    )


def _load_profile(folder: Path, plan: Plan) -> Profile | None:
    """Return the plan's profile; None if the file belongs to another plan."""
    for name in (run_files.PROFILE, BESIDE_PLAN):
        if (folder / name).exists():
            found = Profile.load(folder / name)
            same = found.model.fingerprint == plan.model
            return found if same and found.sequence_length == plan.sequence_length else None
    return None


def _load_record(folder: Path) -> RunRecord | None:
    path = folder / run_files.RUN
    return RunRecord.load(path, fix=OTHER_FOLDER_FIX) if path.exists() else None


def _read_progress(path: Path) -> Progress:
    if not path.exists():
        return Progress("planned")
    try:
        told = json.loads(read_text(path, MARK_BYTES))
    except OSError as error:
        raise make_unreadable_error(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise make_unreadable_error(path, f"it is no JSON: {error}") from error
    if not isinstance(told, dict) or told.get("state") not in get_args(State):
        raise make_unreadable_error(path, "it does not say how the run stands")
    return Progress(
        state=told["state"],
        step=int(parse_number(told.get("step")) or 0),
        steps=None if (steps := parse_number(told.get("steps"))) is None else int(steps),
        loss=parse_number(told.get("loss")),
        why=str(told.get("why") or ""),
        heard_at=parse_number(told.get("time")),
    )


def _list_checkpoints(folder: Path) -> Iterator[tuple[int, str]]:
    with suppress(InputError):  # there is no checkpoint
        for path in list_checkpoints(folder):
            yield parse_step(path), path.name
