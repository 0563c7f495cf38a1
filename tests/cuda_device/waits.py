"""Where the host waited for a device."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

_WAITS: Counter[str] = Counter()
_LOCK = threading.Lock()
_SELF = __file__.rpartition("/")[0]
# The code of these is not whose line is asked for.
_INNER = ("/torch/", "/contextlib.py", "/functools.py", _SELF)


def host_waits() -> Counter[str]:
    """How often the host has waited since `reset_host_waits`, by "file:line" of the innermost
    Python code outside torch. Backward's threads have none; theirs is the main thread's."""
    with _LOCK:
        return Counter(_WAITS)


def reset_host_waits() -> None:
    """Forget all waits."""
    with _LOCK:
        _WAITS.clear()


def tell(_why: bytes) -> None:
    """The host is about to wait, in this thread."""
    frame = _outside(sys._getframe().f_back) or _outside(_of_main())
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"
    with _LOCK:
        _WAITS[place] += 1


def _of_main() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None and any(part in frame.f_code.co_filename for part in _INNER):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename.endswith("/threading.py"):
        return None
    return frame
