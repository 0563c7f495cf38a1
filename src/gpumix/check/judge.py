"""All checks in report order, and their evaluation of a survey. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpumix.check.facts.cluster import Survey
from gpumix.check.finding import Finding, Severity, worst_first
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
    fine: Callable[[Survey], str]
    numbers: Callable[[Survey], dict[str, float]] = lambda _: {}


CHECKS = (
    Check("ranks", software.ranks, software.ranks_fine),
    Check("versions", software.versions, software.versions_fine),
    Check("driver", software.driver, software.driver_fine),
    Check("kernels", software.kernels, software.kernels_fine),
    Check("gpus", gpus.health, gpus.health_fine),
    Check("speed", gpus.speed, gpus.speed_fine, gpus.speeds),
    Check("links", links.links, links.links_fine, links.rates),
    Check("clocks", links.clocks, links.clocks_fine, links.skews),
    Check("settings", hosts.settings, hosts.settings_fine),
    Check("limits", hosts.limits, hosts.limits_fine),
    Check("cores", hosts.cores, hosts.cores_fine),
    Check("memory", hosts.memory, hosts.memory_fine, hosts.free_memory),
    Check("shared memory", hosts.shared_memory, hosts.shared_memory_fine),
    Check("disk", hosts.disk, hosts.disk_fine, hosts.free_disk),
    Check("packages", job.packages, job.packages_fine),
    Check("model", job.model, job.model_fine),
    Check("data", job.data, job.data_fine),
)


def judge(survey: Survey) -> list[Finding]:
    """Return findings of all checks, worst first; passed checks report as OK."""
    found: list[Finding] = []
    for check in CHECKS:
        wrong = list(check.find(survey))
        fine = "" if wrong else check.fine(survey)
        found += wrong
        if fine:
            numbers = check.numbers(survey)
            ok = Finding(check=check.name, severity=Severity.OK, what=fine, measured=numbers)
            found.append(ok)
    return worst_first(found)
