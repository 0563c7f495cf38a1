"""Checks of a run's folder before anything is measured."""

from __future__ import annotations

from pathlib import Path

from gpumix.schema.errors import InputError
from gpumix.schema.files import find_special_kind
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.step_trace import Trace
from gpumix.schema.profile.profile import Profile
from gpumix.schema.value import Document
from gpumix.train.run_log import run_files
from gpumix.train.run_manifest import RunRecord

_DOCUMENTS: dict[str, type[Document]] = {
    run_files.RUN: RunRecord,
    run_files.PROFILE: Profile,
    run_files.PLAN: Plan,
}


def check_folder(folder: Path, *, traces: bool = False) -> None:
    """Check that a run neither waits for a special file nor overwrites foreign documents.

    Args:
        traces: whether the run writes a trace.

    Raises:
        InputError: a pipe, a socket or a device is there, or a document that may not be replaced.
    """
    for name in sorted(run_files.ALL):
        if thing := find_special_kind(folder / name):
            raise InputError(
                f"it is {thing}, where a run has a file",
                where=str(folder / name),
                fix="write elsewhere, or remove it",
            )
    documents = _DOCUMENTS | ({run_files.TRACE: Trace} if traces else {})
    for name, kind in documents.items():
        kind.check_replaceable(folder / name)
