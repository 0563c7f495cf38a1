"""Conversion of any error into an actionable `GpumixError`: culprit, place, and exit code.

This is the edge of a rank: below it are errors of Python and torch, above it `GpumixError`s that
cross to other processes.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import gpumix
from gpumix.schema.errors import (
    GpumixError,
    InputError,
    MachineError,
    TrainingError,
    format_in_one_line,
    get_first_line,
)

_PACKAGE = Path(gpumix.__file__).parent
# Code passed by every operation, or by every call of an examined function: files, and folders.
WRAPPERS = (
    "hardware/emulation/pacer.py",
    "profiler/compute/memory_counter.py",
    "doctor/function/",
)
# Here gpumix calls code of the job: a model, a factory, a dataset.
JOB_CALLERS = (
    "engine/loss/objective.py",
    "engine/model/unit_values.py",
    "engine/schedule/sequential_schedule.py",
    "data/core/factory.py",
    "data/sources/map_style.py",
)


def translate_error(error: BaseException, where: str) -> GpumixError:
    """Return `error` as a `GpumixError`; a foreign error happened at `where`.

    Without the traceback, which is for `--debug`.
    """
    if isinstance(error, GpumixError):
        return error
    if _is_store_error(error):
        from gpumix.engine.rank_group import store_gone

        return store_gone(where, get_first_line(error))
    frames = traceback.extract_tb(error.__traceback__)
    files = [_get_package_path(frame) for frame in frames]
    own = [n for n, file in enumerate(files) if file and not file.startswith(WRAPPERS)]
    last = own[-1] if own else -1
    behind = zip(frames[last + 1 :], files[last + 1 :])
    jobs = [frame for frame, file in behind if file is None and not _is_torch_frame(frame)]
    of_job = bool(own and jobs) and files[last] in JOB_CALLERS
    at = [_format_frame(jobs[-1] if of_job else frames[last])] if frames else []
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes) and error.strerror:
        file = os.fsdecode(error.filename)
        why = f"at {at[0]}" if at else ""
        return MachineError(
            error.strerror,
            code="system-error",
            where=", ".join(filter(None, [where, file])),
            why=why,
        )
    where = ", ".join(filter(None, [where, *at]))
    if isinstance(error, OSError):
        return MachineError(str(error.strerror or error), code="system-error", where=where)
    what = format_in_one_line(error)
    if of_job:
        # A factory is part of the input; the rest runs in training.
        kind = InputError if files[last] == "data/core/factory.py" else TrainingError
        return kind(
            f"the job's own code failed: {what}",
            code="job-code-failed",
            where=where,
            fix="run it again with --debug, which shows the whole way there",
        )
    return GpumixError(
        f"a bug in gpumix: {what}",
        code="bug",
        where=where,
        fix="run it again with --debug and report what that shows",
    )


def _is_store_error(error: BaseException) -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and isinstance(error, dist.DistStoreError | dist.DistNetworkError)


def _get_package_path(frame: traceback.FrameSummary) -> str | None:
    """Return the file of a frame within the package; None if elsewhere."""
    path = Path(frame.filename)
    return path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else None


def _is_torch_frame(frame: traceback.FrameSummary) -> bool:
    return "/torch/" in Path(frame.filename).as_posix()


def _format_frame(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} in {frame.name}"
