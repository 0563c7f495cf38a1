"""What can go wrong, said so that a reader can act on it.

Every error that gpumix raises on purpose is a `GpumixError`: what is wrong, where, why, and the fix
as a command or an edit. The command line prints it without a traceback and leaves with its code.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_BUG = 1
EXIT_INTERRUPTED = 130


class GpumixError(Exception):
    """Base of all errors that gpumix raises on purpose.

    Args:
        what: what is wrong, one sentence without a full stop.
        where: file and line, host, device, rank or step.
        why: the cause, where it is not plain from `what`.
        fix: what to do, as a command or an edit.
    """

    exit_code = EXIT_BUG

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process borders on their way to the launcher."""
        return (_rebuild, (type(self), self.what, self.where, self.why, self.fix))

    def as_dict(self) -> dict[str, object]:
        """The error as `--json` prints it."""
        return {
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "fix": self.fix,
        }


def _rebuild(cls: type[GpumixError], what: str, where: str, why: str, fix: str) -> GpumixError:
    return cls(what, where=where, why=why, fix=fix)


class InputError(GpumixError):
    """The user's input is wrong: a key, a value, a file, an argument."""

    exit_code = 2


class MachineError(GpumixError):
    """The machine cannot do it: a missing package, driver, compiler, port or disk space."""

    exit_code = 3


class NoFeasiblePlanError(GpumixError):
    """No plan fits the devices."""

    exit_code = 4


class TrainingError(GpumixError):
    """Training started and had to stop: a dead rank, a non-finite loss, out of memory."""

    exit_code = 5


class Interrupted(GpumixError):
    """The user asked to stop; a checkpoint was saved."""

    exit_code = EXIT_INTERRUPTED


def first_line(error: BaseException) -> str:
    """Of what an error says; its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_a_line(error: BaseException) -> str:
    """An error of any library: its type, and the first line of what it says."""
    name, said = type(error).__name__, first_line(error)
    return said if said == name else f"{name}: {said}"
