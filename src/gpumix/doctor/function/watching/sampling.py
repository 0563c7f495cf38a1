"""Lines of user code that the main thread runs between steps, sampled by a thread."""

from __future__ import annotations

import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType

from gpumix.doctor.function.observations import Site
from gpumix.doctor.function.patches import format_line, is_user_file

LOOK_S = 0.003  # between samples
SWITCH_S = 0.0005  # after which the main thread hands over the interpreter for a sample
LONGEST_CODE = 50  # characters of a line shown


class LineSampler:
    """Samples of the main thread's innermost line of user code, from `begin` to `end`.

    Args:
        interval: returns an object while samples count, the same one throughout an interval;
            otherwise None.
        elsewhere: files of functions whose time is attributed to other causes; samples inside of
            them do not count.
    """

    def __init__(self, interval: Callable[[], object], elsewhere: Iterable[str]) -> None:
        self._interval, self._elsewhere = interval, frozenset(elsewhere)
        self._counts: Counter[tuple[str, int]] = Counter()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._switch_s = 0.0

    def begin(self) -> None:
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._sample, name="gpumix-lines", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop sampling; repeatable."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            sys.setswitchinterval(self._switch_s)

    def seen(self, seconds: float) -> tuple[Site, ...]:
        """Return the lines, most samples first, each with its part of `seconds`."""
        samples = sum(self._counts.values())
        return tuple(
            Site(format_line(name, number), _read_code(name, number), n, seconds * n / samples)
            for (name, number), n in self._counts.most_common()
        )

    def _sample(self) -> None:
        main = threading.main_thread().ident
        while not self._ended.wait(LOOK_S):
            interval = self._interval()
            frame = sys._current_frames().get(main or 0)
            if interval is not None and interval is self._interval() and frame is not None:
                line = self._find_line(frame)
                if line is not None:
                    self._counts[line] += 1

    def _find_line(self, frame: FrameType | None) -> tuple[str, int] | None:
        """Return the innermost line of user code; None without, or inside of `elsewhere`."""
        found: tuple[str, int] | None = None
        while frame is not None:
            name = frame.f_code.co_filename
            if name in self._elsewhere:
                return None
            if found is None and is_user_file(name):
                found = name, frame.f_lineno
            frame = frame.f_back
        return found


def _read_code(name: str, number: int) -> str:
    code = linecache.getline(name, number).strip()
    return code if len(code) <= LONGEST_CODE else code[:LONGEST_CODE].rstrip() + "..."
