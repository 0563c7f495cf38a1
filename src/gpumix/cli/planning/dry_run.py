"""Dry run: everything that a start of a job checks, and what it would run where.

Starts no process and writes no file. Imports torch, as model and data are opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpumix.cli.common import shows_tracebacks
from gpumix.cli.planning.estimate_source import NamedCluster, estimate_job
from gpumix.schema.errors import InputError
from gpumix.schema.reading.error_location import locate_errors
from gpumix.schema.units import format_count

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpumix.schema.cluster.cluster import Cluster, Device
    from gpumix.schema.job.job import Job
    from gpumix.schema.plan.plan import Plan
    from gpumix.schema.profile.profile import Profile
    from gpumix.train.controller import JobController, UserPlan

MOST_RANKS = 16  # groups of ranks listed

Basis = Literal["given", "measured", "estimated", "none"]


@dataclass(frozen=True)
class ForeseenPlan:
    """The plan that a start would train by, as far as it is known without measuring.

    Attributes:
        plan: None if the devices must be measured first, and no datasheet knows them.
        basis: where the plan is from.
        assumed: assumptions behind an estimate, in a sentence.
        doubt: why its times are uncertain beyond the usual error.
    """

    plan: Plan | None
    basis: Basis
    assumed: str = ""
    doubt: str = ""


@dataclass(frozen=True)
class ForeseenStart:
    """What a start of a job would do.

    Attributes:
        file: of the job.
        devices: of the ranks, in rank order.
        data: description of the data; empty if only the hosts can open it.
        first: what is measured before training; empty for nothing.
        warnings: lines on what trains, but hardly as intended.
    """

    file: Path
    job: Job
    foreseen: ForeseenPlan
    devices: tuple[Device, ...]
    data: str = ""
    first: str = ""
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the start as printed by `--json`."""
        plan = self.foreseen.plan
        return {
            "dry_run": True,
            "basis": self.foreseen.basis,
            "plan": None if plan is None else plan.model_dump(mode="json"),
            "ranks": [
                {"rank": rank, "device": d.id, "class": d.device_class, "host": d.host}
                for rank, d in enumerate(self.devices)
            ],
            "output_dir": str(self.job.output_dir),
            "data": self.data,
            "warnings": list(self.warnings),
        }


def check_job(
    path: Path,
    overrides: Sequence[str],
    allowed: Sequence[str],
    given: UserPlan,
    *,
    resume: bool,
) -> ForeseenStart:
    """Check a job as its start on this host does.

    Raises:
        GpumixError: the start would be refused.
    """
    from gpumix.hardware.host.environment import world_size
    from gpumix.train.console.terminal import show_waiting
    from gpumix.train.controller import JobController

    if world_size() > 1:
        raise InputError(
            "a dry run is one process, and a launcher started several",
            code="dry-run-under-launcher",
            where="--dry-run",
            fix=f"gpumix train {path} --dry-run, without torchrun",
        )
    with locate_errors(path), show_waiting("checking the job"):
        controller = JobController.of_file(
            path, overrides, allowed=allowed, debug=shows_tracebacks()
        )
        plan, _ = controller.check_start(given, resume=resume)
        devices = controller.devices_of(plan)
        data, warnings = _check_contents(controller)
        if plan is not None:
            foreseen = ForeseenPlan(plan, "given")
        else:
            foreseen = _foresee_plan(controller, path)
        used = foreseen.plan
    return ForeseenStart(
        path,
        controller.job,
        foreseen,
        devices if used is None else controller.devices_of(used),
        data,
        "" if foreseen.basis in ("given", "measured") else _describe_measuring(controller),
        tuple(warnings),
    )


def check_job_of_hosts(
    path: Path, overrides: Sequence[str], cluster: Cluster | None
) -> ForeseenStart:
    """Check a job that starts on other hosts, as far as its file and cluster tell: model and data
    are theirs.

    Raises:
        GpumixError: the start would be refused.
    """
    from gpumix.schema.reading.read import read_job

    job = read_job(path, overrides)
    if cluster is None:
        return ForeseenStart(path, job, ForeseenPlan(None, "none"), ())
    with locate_errors(path):
        foreseen = _plan_for(job, path, cluster, _load_profile(job, path, cluster))
    return ForeseenStart(path, job, foreseen, cluster.in_rank_order())


def _check_contents(controller: JobController) -> tuple[str, list[str]]:
    from gpumix.hardware.device import check_accelerator
    from gpumix.train.checks.job_contents import check_contents
    from gpumix.train.checks.job_warnings import warn_of_schedule

    for device_class in controller.cluster.classes:
        check_accelerator(device_class)
    data, warnings = check_contents(controller.job, controller.cluster, controller.folder)
    return data, [*warn_of_schedule(controller.job), *warnings]


def _foresee_plan(controller: JobController, path: Path) -> ForeseenPlan:
    """Return the plan by the measurements in the cache, or else by datasheets."""
    profile = controller.known_profile()
    return _plan_for(controller.job, path, controller.cluster, profile)


def _load_profile(job: Job, path: Path, cluster: Cluster) -> Profile | None:
    from gpumix.profiler.cache.measurement_cache import MeasurementCache

    return MeasurementCache(job, cluster, path.absolute().parent).load()


def _plan_for(job: Job, path: Path, cluster: Cluster, profile: Profile | None) -> ForeseenPlan:
    """Return the plan by a profile; without one by an estimate, if there can be one."""
    from gpumix.hardware.host.environment import available_host_bytes
    from gpumix.train.console.plan_page import describe_doubt
    from gpumix.train.controller import plan_job

    if profile is not None:
        plan = plan_job(job, profile, leaving_out=True)
        return ForeseenPlan(plan, "measured", doubt=describe_doubt(profile))
    try:
        estimate = estimate_job(job, path, NamedCluster(known=cluster), available_host_bytes())
        estimated = estimate.profile()
    except InputError:  # emulated devices, unknown GPUs, models without an estimate
        return ForeseenPlan(None, "none")
    with locate_errors("estimate from datasheets"):
        plan = plan_job(job, estimated, leaving_out=True)
    return ForeseenPlan(plan, "estimated", estimate.describe(estimated), describe_doubt(estimated))


def _describe_measuring(controller: JobController) -> str:
    """Describe what a start measures before it trains."""
    from gpumix.profiler.cache.measurement_cache import MeasurementCache

    job = controller.job
    missing = MeasurementCache(job, controller.cluster, controller.folder).missing()
    if not missing:
        return "measures links and reading of samples"
    seconds = f"{job.advanced.profile_budget:.0f} s each at most"
    return f"measures this model on {', '.join(missing)}, {seconds}"


# -- page ------------------------------------------------------------------------------------------


def render_start(start: ForeseenStart) -> RenderableType:
    """Return the page: the plan, and below it what would run where."""
    from rich.text import Text

    from gpumix.train.console.plan_page import plan_page

    foreseen = start.foreseen
    page = Text()
    if foreseen.plan is not None:
        page = plan_page(
            foreseen.plan,
            doubt=foreseen.doubt,
            assumed=foreseen.assumed,
            steps=start.job.max_steps,
        )
    else:
        page.append("Ready. The plan is made once the devices are measured.", "bold")
    for line, style in _iterate_lines(start):
        page.append("\n").append(line, style or None)
    return page


def _iterate_lines(start: ForeseenStart) -> Iterator[tuple[str, str]]:
    from gpumix.train.console.text_page import iterate_labelled

    job, ranks = start.job, list(_group_ranks(start.devices))
    yield "", ""
    for number, text in enumerate(ranks[:MOST_RANKS]):
        yield from iterate_labelled("Would run" if number == 0 else "", text)
    if len(ranks) > MOST_RANKS:
        yield from iterate_labelled("", f"and {len(ranks) - MOST_RANKS} groups of ranks more")
    if start.first:
        yield from iterate_labelled("First", start.first)
    if start.data:
        yield from iterate_labelled("Data", start.data)
    steps = format_count(job.max_steps, "step")
    samples = format_count(job.global_batch_size, "sample")
    yield from iterate_labelled("Trains", f"{steps} of {samples}")
    yield from iterate_labelled("Writes", str(job.output_dir))
    for warning in start.warnings:
        yield from iterate_labelled("Warning", warning, "yellow")
    yield "", ""
    yield "Dry run: nothing was started or written.", "bold"


def _group_ranks(devices: Sequence[Device]) -> Iterator[str]:
    """Yield consecutive ranks of one GPU type on one host."""
    from gpumix.hardware.estimates.gpu_catalogue import shorten_product

    rank = 0
    for (name, host), group in groupby(devices, lambda d: (d.device_class, d.host)):
        count = len(list(group))
        ranks = f"rank {rank}" if count == 1 else f"ranks {rank}-{rank + count - 1}"
        yield f"{ranks} on {count}x {shorten_product(name)} of {host}"
        rank += count
