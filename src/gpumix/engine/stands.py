"""Where a thread stands: what it called, in few words."""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from traceback import extract_stack

# As many calls are told.
CALLS = 4
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib")))


def where_main_stands() -> str:
    """The innermost calls of the main thread: those outside of Python's and installed packages, and
    the innermost of all."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    calls = extract_stack(frame)
    own = [call for call in calls[:-1] if not call.filename.startswith(_LIBRARIES)]
    told = [*own[-CALLS + 1 :], calls[-1]]
    return ", ".join(
        f"{Path(call.filename).name}:{call.lineno} in {call.name}" for call in reversed(told)
    )
