"""Path of a training step through the package's files, by a profile hook.

Prints all calls of one step: `PYTHONPATH=tests python -m helpers.training.step_path`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import gpumix

PACKAGE = str(Path(gpumix.__file__).parent)


class Visit(NamedTuple):
    """Entry into or return to a function of the package; `file` is relative to the package."""

    file: str
    function: str


class StepPath(NamedTuple):
    """Visits of one step, in order."""

    visits: list[Visit]

    @property
    def files(self) -> list[str]:
        return sorted({visit.file for visit in self.visits})

    @property
    def changes(self) -> int:
        """Number of times that execution goes from one file of the package to another."""
        return sum(1 for _ in groupby(visit.file for visit in self.visits)) - 1


def follow(step: Callable[[], Any]) -> StepPath:
    """Run `step` on this thread and return its path: calls of the package's functions, and returns
    into them. Other code in between (torch, the model) counts for nothing."""
    visits: list[Visit] = []
    names: dict[str, str] = {}

    def visit(frame: FrameType) -> None:
        code = frame.f_code
        file = names.get(code.co_filename)
        if file is None:
            path = code.co_filename
            file = path[len(PACKAGE) + 1 :] if path.startswith(PACKAGE) else ""
            names[path] = file
        if file:
            visits.append(Visit(file, code.co_name))

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            visit(frame)
        elif event == "return" and frame.f_back is not None:
            visit(frame.f_back)

    sys.setprofile(hook)
    try:
        step()
    finally:
        sys.setprofile(None)
    return StepPath(visits)
