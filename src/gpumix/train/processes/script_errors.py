"""Errors of gpumix that end a script: the message and the script's line instead of a traceback."""

from __future__ import annotations

import functools
import sys
import traceback
from pathlib import Path
from types import TracebackType

import gpumix
from gpumix.hardware.host.environment import shows_tracebacks
from gpumix.schema.errors import GpumixError

_INSTALLED = (Path(gpumix.__file__).parent, Path(traceback.__file__).parent)


@functools.cache  # once in a process: later hooks call this hook
def show_errors_without_traceback() -> None:
    """Print a `GpumixError` that ends this program like the command line does, followed by the line
    of the script. Other errors are printed as before. `GPUMIX_TRACEBACK=1` keeps tracebacks."""
    if shows_tracebacks():
        return
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, GpumixError):
            hook(kind, error, trace)
            return
        sys.stderr.write(f"gpumix: {error}\n{_format_caller(trace)}")

    sys.excepthook = show


def _format_caller(trace: TracebackType | None) -> str:
    """Return the last line of the traceback outside of installed packages, or nothing."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if "site-packages" not in Path(frame.filename).parts
        and not frame.filename.startswith("<")
        and not any(Path(frame.filename).is_relative_to(folder) for folder in _INSTALLED)
    ]
    if not frames:
        return ""
    last = frames[-1]
    return f"  called at: {last.filename}:{last.lineno}, {last.line}\n"
