"""Where a thread stands: what it called, in few words."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_stack

# As many calls are told.
CALLS = 4
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib")))
_doing: dict[int, str] = {}  # what each thread is at, by its identity


@contextmanager
def doing(what: str) -> Iterator[None]:
    """So it is told where this thread stands while it is inside: "in the reduction of ..."."""
    thread = threading.get_ident()
    outer = _doing.get(thread, "")
    _doing[thread] = what
    try:
        yield
    finally:
        _doing[thread] = outer


def where_main_stands() -> str:
    """The innermost calls of the main thread: those outside of Python's and installed packages, and
    the innermost of all; and what it is `doing`."""
    main = threading.main_thread().ident or 0
    frame = sys._current_frames().get(main)
    if frame is None:
        return ""
    calls = extract_stack(frame)
    own = [call for call in calls[:-1] if not call.filename.startswith(_LIBRARIES)]
    told = [*own[-CALLS + 1 :], calls[-1]]
    place = ", ".join(
        f"{Path(call.filename).name}:{call.lineno} in {call.name}" for call in reversed(told)
    )
    what = _doing.get(main)
    return f"{place} ({what})" if what else place
