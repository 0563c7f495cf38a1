"""All checks in report order, and their evaluation of a survey. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpumix.check.facts.cluster import Survey
from gpumix.check.finding import Finding, Severity, sort_by_severity
from gpumix.check.rules import gpus, hosts, job, links, software


@dataclass(frozen=True)
class Check:
    """A check of a survey.

    Attributes:
        find: yields problems.
        fine: message without problems; empty if the check does not apply.
        numbers: measured values behind the result.
    """

    name: str
    find: Callable[[Survey], Iterator[Finding]]
    describe_success: Callable[[Survey], str]
    numbers: Callable[[Survey], dict[str, float]] = lambda _: {}


CHECKS = (
    Check("ranks", software.check_ranks, software.describe_ranks),
    Check("versions", software.check_versions, software.describe_versions),
    Check("driver", software.check_driver, software.describe_driver),
    Check("kernels", software.check_kernels, software.describe_kernels),
    Check("gpus", gpus.check_health, gpus.describe_health),
    Check("speed", gpus.check_speed, gpus.describe_speed, gpus.collect_speeds),
    Check("links", links.check_links, links.describe_links, links.collect_rates),
    Check("clocks", links.check_clocks, links.describe_clocks, links.collect_clock_skews),
    Check("settings", hosts.check_settings, hosts.describe_settings),
    Check("limits", hosts.check_limits, hosts.describe_limits),
    Check("cores", hosts.check_cores, hosts.describe_cores),
    Check("memory", hosts.check_memory, hosts.describe_memory, hosts.collect_free_memory),
    Check("shared memory", hosts.check_shared_memory, hosts.describe_shared_memory),
    Check("disk", hosts.check_disk, hosts.describe_disk, hosts.collect_free_disk),
    Check("packages", job.check_packages, job.describe_packages),
    Check("model", job.check_model, job.describe_model),
    Check("data", job.check_data, job.describe_data),
)


def evaluate_survey(survey: Survey) -> list[Finding]:
    """Return findings of all checks, worst first; passed checks report as OK."""
    found: list[Finding] = []
    for check in CHECKS:
        wrong = [one.model_copy(update={"check": check.name}) for one in check.find(survey)]
        fine = "" if wrong else check.describe_success(survey)
        found += wrong
        if fine:
            numbers = check.numbers(survey)
            ok = Finding(check=check.name, severity=Severity.OK, what=fine, measured=numbers)
            found.append(ok)
    return sort_by_severity(found)
