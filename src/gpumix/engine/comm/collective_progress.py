"""Position of this rank: calls of a thread, collectives begun, and the collective being awaited.
Nothing here imports torch."""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from traceback import extract_stack

from gpumix.engine.comm.hang_attribution import AwaitedCollective, RankProgress

# Number of calls reported.
MAX_REPORTED_CALLS = 4
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib")))
_doing: dict[int, tuple[str, AwaitedCollective | None]] = {}  # activity of each thread, by identity
_begun: dict[str, AwaitedCollective] = {}  # the last collective of each group
# Activity of the engine in the current step, such as "backward", and its unit; assigned, not set by
# a call, because it changes several times in each unit call.
compute_phase = ("", "")


def begin_collective(group: str, members: tuple[int, ...] = ()) -> AwaitedCollective:
    """Begin the next collective of a group on this rank; return the `AwaitedCollective`.

    Args:
        group: a name that is equal on all ranks.
        members: ranks of the group; empty: all ranks.
    """
    before = _begun.get(group)
    one = AwaitedCollective(group, before.number + 1 if before else 1, members)
    _begun[group] = one
    return one


class ActivityScope:
    """Context naming this thread's activity for reports: "in the reduction of ...".

    Args:
        wait: the collective that the thread waits for.
    """

    def __init__(self, what: str, wait: AwaitedCollective | None = None) -> None:
        self.what = what
        self.wait = wait

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._outer = _doing.get(thread, ("", None))
        _doing[thread] = self.what, self.wait

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        _doing[threading.get_ident()] = self._outer


def get_awaited_collective(thread: int | None) -> AwaitedCollective | None:
    """Return the collective that a thread waits for, if any."""
    return _doing.get(thread or 0, ("", None))[1]


def get_main_progress(*, runs_ahead: bool) -> RankProgress:
    """Return the progress of the main thread.

    Args:
        runs_ahead: True if the thread runs ahead of its device, which may wait for all begun.
    """
    begun = list(_begun.copy().values())
    what, wait = _doing.get(threading.main_thread().ident or 0, ("", None))
    waits = [wait] if wait else begun if runs_ahead else []
    return RankProgress({one.group: one.number for one in begun}, tuple(waits), what)


def describe_main_thread() -> str:
    """Describe the main thread's position: its innermost calls outside of Python and of installed
    packages, the innermost call of all, and the activities by `ActivityScope` and
    `compute_phase`."""
    main = threading.main_thread().ident or 0
    frame = sys._current_frames().get(main)
    if frame is None:
        return ""
    calls = extract_stack(frame)
    own = [call for call in calls[:-1] if not call.filename.startswith(_LIBRARIES)]
    told = [*own[-MAX_REPORTED_CALLS + 1 :], calls[-1]]
    place = ", ".join(
        f"{Path(call.filename).name}:{call.lineno} in {call.name}" for call in reversed(told)
    )
    what, _ = _doing.get(main, ("", None))
    phase, unit = compute_phase
    told_too = ", ".join(filter(None, (what, f"{phase} of unit '{unit}'" if unit else phase)))
    return f"{place} ({told_too})" if told_too else place
