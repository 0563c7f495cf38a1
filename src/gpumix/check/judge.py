"""All checks in report order, and their evaluation of a survey. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpumix.check import of_gpus, of_hosts, of_job, of_links, of_software
from gpumix.check.facts import Survey
from gpumix.check.finding import Finding, Severity, worst_first


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
    Check("ranks", of_software.ranks, of_software.ranks_fine),
    Check("versions", of_software.versions, of_software.versions_fine),
    Check("driver", of_software.driver, of_software.driver_fine),
    Check("kernels", of_software.kernels, of_software.kernels_fine),
    Check("gpus", of_gpus.health, of_gpus.health_fine),
    Check("speed", of_gpus.speed, of_gpus.speed_fine, of_gpus.speeds),
    Check("links", of_links.links, of_links.links_fine, of_links.rates),
    Check("clocks", of_links.clocks, of_links.clocks_fine, of_links.skews),
    Check("settings", of_hosts.settings, of_hosts.settings_fine),
    Check("limits", of_hosts.limits, of_hosts.limits_fine),
    Check("cores", of_hosts.cores, of_hosts.cores_fine),
    Check("memory", of_hosts.memory, of_hosts.memory_fine, of_hosts.free_memory),
    Check("shared memory", of_hosts.shared_memory, of_hosts.shared_memory_fine),
    Check("disk", of_hosts.disk, of_hosts.disk_fine, of_hosts.free_disk),
    Check("packages", of_job.packages, of_job.packages_fine),
    Check("model", of_job.model, of_job.model_fine),
    Check("data", of_job.data, of_job.data_fine),
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
