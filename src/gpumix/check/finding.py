"""One thing that a check found: what, where, how bad, and the fix. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from gpumix.spec.base import Value


class Severity(StrEnum):
    """How bad it is: an error keeps a run from working, a warning makes it slow or frail."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


WORST_FIRST = tuple(Severity)
UUID_SHOWN = len("GPU-") + 8
SHOWN = 4  # places of one finding that are named


class Finding(Value):
    """What a check found.

    Attributes:
        host, device: where; empty for what is of all hosts, or of a whole host.
        fix: a command or an edit; empty where all is well.
        measured: the numbers that it goes by.
    """

    check: str
    severity: Severity
    what: str
    fix: str = ""
    host: str = ""
    device: str = ""
    measured: Mapping[str, float] = {}

    @property
    def place(self) -> str:
        """Host and device, as far as they are known; of a UUID what tells it apart."""
        device = self.device[:UUID_SHOWN] if self.device.startswith("GPU-") else self.device
        return f"{device} on {self.host}" if device and self.host else self.host


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, then warnings, notes, and what is fine; else in their order."""
    return sorted(findings, key=lambda one: WORST_FIRST.index(one.severity))


def has_error(findings: Iterable[Finding]) -> bool:
    return any(one.severity is Severity.ERROR for one in findings)


def lines(findings: Iterable[Finding]) -> Iterator[tuple[Severity, str]]:
    """One line for each thing that was found; what is found in several places is told once."""
    places: dict[tuple[Severity, str, str, str], list[str]] = {}
    for one in worst_first(findings):
        key = (one.severity, one.check, one.what, one.fix)
        places.setdefault(key, []).extend([one.place] if one.place else [])
    for (severity, check, what, fix), where in places.items():
        yield severity, f"{check}: {_named(where)}{what}{f'; fix: {fix}' if fix else ''}"


def _named(places: list[str]) -> str:
    if not places:
        return ""
    places = list(dict.fromkeys(places))  # a host is named once, whatever many of its ranks say
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return f"{', '.join(places[:SHOWN])}{more}: "
