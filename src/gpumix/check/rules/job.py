"""Checks of a job on each host: packages, data, and a model fitting the data. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpumix.check.facts.cluster import JobHostFacts, Survey
from gpumix.check.finding import Finding, Severity


def check_packages(survey: Survey) -> Iterator[Finding]:
    """Check for packages required by the job's keys."""
    for host, job in _list_host_jobs(survey):
        for name, fix in job.missing.items():
            yield Finding(
                severity=Severity.ERROR,
                what=f"the job needs {name}, which is not here",
                fix=fix,
                host=host,
            )


def describe_packages(survey: Survey) -> str:
    return "all that the job names are there" if _list_host_jobs(survey) else ""


def check_model(survey: Survey) -> Iterator[Finding]:
    """Check building the model, and its fit to the data."""
    yield from _report_troubles(survey, "model")


def describe_model(survey: Survey) -> str:
    job = survey.job
    if job is None or job.checkpoint_bytes is None:
        return ""
    return "it can be built"


def check_data(survey: Survey) -> Iterator[Finding]:
    """Check reading the data, and equal data on all hosts."""
    yield from _report_troubles(survey, "data")
    told = [(host, job.data) for host, job in _list_host_jobs(survey) if job.data]
    for host, mark in told[1:]:
        if mark != told[0][1]:
            yield Finding(
                severity=Severity.ERROR,
                what=f"its data are {mark}, those of {told[0][0]} {told[0][1]}",
                fix="give every host the same data files",
                host=host,
            )
    for host, job in _list_host_jobs(survey):
        if job.slow:
            yield Finding(
                severity=Severity.NOTE,
                what=f"the job's model and data were not looked at to their end: {job.slow}",
                fix="a run waits for them too: look at the disk, and at the job's own factories",
                host=host,
            )


def describe_data(survey: Survey) -> str:
    read = (job.data.partition(",")[0] for _, job in _list_host_jobs(survey) if job.data)
    return next((f"readable: {data}" for data in read), "")


def _report_troubles(survey: Survey, check: str) -> Iterator[Finding]:
    for host, job in _list_host_jobs(survey):
        if check in job.trouble:
            what, fix = job.trouble[check]
            yield Finding(severity=Severity.ERROR, what=what, fix=fix, host=host)


def _list_host_jobs(survey: Survey) -> list[tuple[str, JobHostFacts]]:
    return [] if survey.job is None else list(survey.job.on_hosts.items())
