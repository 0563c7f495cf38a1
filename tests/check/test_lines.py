"""How findings are told: the worst first, what is found in several places once."""

from __future__ import annotations

from gpumix.check.finding import Finding, Severity, format_findings, has_error


def finding(severity: Severity, what: str, **place: str) -> Finding:
    return Finding(check="disk", severity=severity, what=what, fix="make room", **place)


def test_the_worst_comes_first():
    found = [finding(s, s.value) for s in (Severity.OK, Severity.WARNING, Severity.ERROR)]
    assert [severity for severity, _ in format_findings(found)] == ["error", "warning", "ok"]
    assert has_error(found) and not has_error(found[:2])


def test_what_is_the_same_in_many_places_is_one_line():
    found = [finding(Severity.ERROR, "full", host=f"h{n}") for n in range(6)]
    (line,) = [line for _, line in format_findings(found)]
    assert line == "disk: h0, h1, h2, h3 and 2 more: full; fix: make room"


def test_a_host_is_named_once_for_all_of_its_ranks():
    found = [finding(Severity.ERROR, "full", host="a")] * 3
    assert [line for _, line in format_findings(found)] == ["disk: a: full; fix: make room"]


def test_a_device_is_named_with_its_host():
    found = [finding(Severity.NOTE, "slow", host="a", device="GPU-0123456789ab-cdef")]
    assert [line for _, line in format_findings(found)] == [
        "disk: GPU-01234567 on a: slow; fix: make room",
    ]
