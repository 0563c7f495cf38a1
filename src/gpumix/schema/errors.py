"""Errors with enough information for the reader to act.

Every error that gpumix raises on purpose is a `GpumixError`: what is wrong, where, why, and the fix
as a command or an edit. The CLI prints the error without a traceback and exits with its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from gpumix.schema.untrusted_text import escape_invisible

EXIT_OK = 0
EXIT_BUG = 1
EXIT_INTERRUPTED = 130
_FIELDS = ("code", "where", "why", "fix")  # arguments of every error, after `what`
ENDED_AT_ONCE = "ended at once, without saving anything more"

E = TypeVar("E", bound="GpumixError")


class GpumixError(Exception):
    """Base of all errors that gpumix raises on purpose.

    Args:
        what: the problem, one sentence without a full stop.
        code: keyword of the kind of mistake, in kebab-case: stable where words are not.
        where: file and line, host, device, rank or step.
        why: the cause, if `what` does not make it obvious.
        fix: the remedy, as a command or an edit.
    """

    exit_code = EXIT_BUG
    _more: ClassVar[tuple[str, ...]] = ()  # further arguments of a subclass

    def __init__(
        self, what: str, *, code: str = "", where: str = "", why: str = "", fix: str = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        self.code = code
        self.where = where
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return escape_invisible("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling: errors cross process boundaries on the way to the launcher."""
        return (partial(type(self), self.what, **self._details()), ())

    def as_dict(self) -> dict[str, object]:
        """Return the error as printed by `--json`."""
        return {
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            "what": self.what,
            **self._details(),
        }

    def _details(self) -> dict[str, Any]:
        """Return the further constructor arguments, by name."""
        return {name: getattr(self, name) for name in (*_FIELDS, *self._more)}


def convert_error(error: GpumixError, kind: type[E], **changes: Any) -> E:
    """Return an error as one of `kind`, with changed arguments."""
    fields = {name: getattr(error, name) for name in ("what", *_FIELDS)}
    return kind(**(fields | changes))


def rebuild_error(told: Mapping[str, Any]) -> GpumixError:
    """Rebuild an error from its `as_dict`; a class unknown here becomes a GpumixError."""
    known: list[type[GpumixError]] = [GpumixError]
    for cls in known:
        known += cls.__subclasses__()
    of_name = {cls.__name__: cls for cls in known}
    names = [name for name in told if name not in ("error", "exit_code", "what")]
    if told["error"] not in of_name:
        names = [*_FIELDS]
    cls = of_name.get(told["error"], GpumixError)
    return cls(told["what"], **{name: told[name] for name in names})


class InputError(GpumixError):
    """The user's input is wrong: a key, a value, a file, an argument."""

    exit_code = 2


class MachineError(GpumixError):
    """The machine lacks a requirement: a package, driver, compiler, port or disk space."""

    exit_code = 3


class DeviceMissing(MachineError):
    """A process does not see the GPU assigned for its compute.

    Args:
        device: id of the GPU.
    """

    _more = ("device",)

    def __init__(self, what: str, *, device: str = "", **others: str) -> None:
        super().__init__(what, **others)
        self.device = device


class NoFeasiblePlanError(GpumixError):
    """No plan fits the devices."""

    exit_code = 4


class LoadingMemoryError(NoFeasiblePlanError):
    """A host lacks the memory to read the weights with any plan."""


class TrainingError(GpumixError):
    """Training started and had to stop: a dead rank, a non-finite loss, out of memory."""

    exit_code = 5


class DeviceFailure(TrainingError):
    """A device, or the rank on it, failed in a way that need not end the run.

    Args:
        device: id of the device, empty if unknown.
        device_class: class of the device.
    """

    _more: ClassVar[tuple[str, ...]] = ("device", "device_class")

    def __init__(
        self, what: str, *, device: str = "", device_class: str = "", **others: str
    ) -> None:
        super().__init__(what, **others)
        self.device = device
        self.device_class = device_class


class RankLost(DeviceFailure):
    """A rank or its device died or stopped responding."""


class OutOfMemory(DeviceFailure):
    """A device ran out of memory, although the plan fits.

    Args:
        fragmented: enough memory was free, but in pieces that were too small.
        obtainable: part of the device's memory available to the process for tensors at that time;
            another process may occupy the rest.
    """

    _more = (*DeviceFailure._more, "fragmented", "obtainable")

    def __init__(
        self, what: str, *, fragmented: bool = False, obtainable: float = 1.0, **others: str
    ) -> None:
        super().__init__(what, **others)
        self.fragmented = fragmented
        self.obtainable = obtainable


class StoreGone(TrainingError):
    """The process hosting the ranks' shared store is gone."""


class PlanOutdated(TrainingError):
    """Step times differ from the plan, and another plan is worth a restart.

    Args:
        slower: measured time relative to the plan's profile, by device id.
        step_s: duration of a step at the end.
    """

    _more = ("slower", "step_s")

    def __init__(
        self, what: str, *, slower: Mapping[str, float], step_s: float = 0.0, **others: str
    ) -> None:
        super().__init__(what, **others)
        self.slower = dict(slower)
        self.step_s = step_s


class Interrupted(GpumixError):
    """The user asked to stop; a checkpoint was saved."""

    exit_code = EXIT_INTERRUPTED


class RankInterrupted(Interrupted):
    """A rank, but not the run, was asked to end; a checkpoint was saved."""


def format_install_command(*extras: str) -> str:
    """Return the command that installs extras of gpumix, which no package index has."""
    return f'pip install ".[{",".join(extras)}]"  # in gpumix\'s folder'


def make_missing_file_error(kind: str, path: str | Path) -> InputError:
    """Return the error for a user-named file of a `kind` that does not exist, with the most similar
    name in its folder."""
    near = _find_similar_file(Path(path))
    return InputError(
        f"there is no such {kind} file",
        code="file-missing",
        where=str(path),
        fix=f"did you mean '{near}'?" if near else "check the name and its folder",
    )


def _find_similar_file(path: Path) -> Path | None:
    """Return the file of the same folder with the most similar name; None if none is similar."""
    try:
        there = {one.stem: one for one in path.parent.iterdir() if one.suffix == path.suffix}
    except OSError:
        return None
    near = get_close_matches(path.stem, there, n=1)
    return there[near[0]] if near else None


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def format_in_one_line(error: BaseException) -> str:
    """Return the type and the first message line of an error from any library."""
    name, said = type(error).__name__, get_first_line(error)
    return said if said == name else f"{name}: {said}"
