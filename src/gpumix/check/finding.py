"""A result of a check: problem, place, severity and fix. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from gpumix.schema.value import Value


class Severity(StrEnum):
    """Severity of a finding: an error prevents a run, a warning makes a run slow or fragile."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


WORST_FIRST = tuple(Severity)
UUID_PREFIX_LENGTH = len("GPU-") + 8
MOST_PLACES = 4  # places named in one finding


class Finding(Value):
    """A finding of a check.

    Attributes:
        check: name of the check, filled in by `evaluate_survey`.
        host, device: place; empty for findings about all hosts or a host in general.
        fix: a command or an edit; empty without a problem.
        measured: numbers behind the finding.
    """

    check: str = ""
    severity: Severity
    what: str
    fix: str = ""
    host: str = ""
    device: str = ""
    measured: Mapping[str, float] = {}

    @property
    def place(self) -> str:
        """Host and device, as far as known; a UUID is cut to its distinguishing start."""
        device = self.device[:UUID_PREFIX_LENGTH] if self.device.startswith("GPU-") else self.device
        return f"{device} on {self.host}" if device and self.host else self.host


def sort_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, worst first, otherwise in their order."""
    return sorted(findings, key=lambda one: WORST_FIRST.index(one.severity))


def has_error(findings: Iterable[Finding]) -> bool:
    return any(one.severity is Severity.ERROR for one in findings)


def format_findings(findings: Iterable[Finding]) -> Iterator[tuple[Severity, str]]:
    """Yield one line per finding, naming all places of equal findings."""
    places: dict[tuple[Severity, str, str, str], list[str]] = {}
    for one in sort_by_severity(findings):
        key = (one.severity, one.check, one.what, one.fix)
        places.setdefault(key, []).extend([one.place] if one.place else [])
    for (severity, check, what, fix), where in places.items():
        yield severity, f"{check}: {_format_places(where)}{what}{f'; fix: {fix}' if fix else ''}"


def _format_places(places: list[str]) -> str:
    if not places:
        return ""
    places = list(dict.fromkeys(places))  # several ranks of one host name the host once
    more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
    return f"{', '.join(places[:MOST_PLACES])}{more}: "
