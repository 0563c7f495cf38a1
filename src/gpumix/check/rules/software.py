"""Checks of present ranks, and of software versions across hosts and against GPUs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpumix.check.facts.cluster import HostFacts, Survey
from gpumix.check.finding import Finding, Severity
from gpumix.hardware.discovery.torch_build import INSTALL_PAGE as WHEELS
from gpumix.hardware.discovery.torch_build import get_kernel_support, parse_version
from gpumix.schema.units import format_count


def check_ranks(survey: Survey) -> Iterator[Finding]:
    """Check for absent ranks, unusable or shared devices, and differing jobs."""
    for rank in survey.ranks:
        if rank.trouble:
            yield Finding(
                severity=Severity.ERROR,
                what=rank.trouble if rank.device else f"rank {rank.rank}: {rank.trouble}",
                fix=rank.fix or f"{rank.look}; with --debug it says more",
                host=rank.host,
                device=rank.device,
                measured={"rank": rank.rank},
            )
    came = [rank for rank in survey.ranks if rank.device]
    for rank in came:
        twin = next((o for o in came if o.device == rank.device and o.rank < rank.rank), None)
        if twin is not None:
            yield Finding(
                severity=Severity.ERROR,
                what=f"rank {rank.rank} has the device of rank {twin.rank}",
                fix="start one process per device; several on one CPU need a `cluster` in the job "
                "with a device for each",
                host=rank.host,
                device=rank.device,
            )
    for rank in came[1:]:
        if rank.job != came[0].job:
            yield Finding(
                severity=Severity.ERROR,
                what=f"its job is not that of {came[0].host}",
                fix="start every host with the same job file and the same --set",
                host=rank.host,
            )


def describe_ranks(survey: Survey) -> str:
    classes = Counter(rank.device_class for rank in survey.ranks)
    named = ", ".join(f"{count} x {name}" for name, count in classes.items())
    hosts = len({rank.host for rank in survey.ranks})
    if not survey.emulated:
        return f"{named} on {format_count(hosts, 'host')} answer"
    number = len(survey.emulated)
    who = "" if number == len(survey.ranks) else f"{number} of them "
    as_if = f", as if on {hosts} hosts" if hosts > 1 else ""
    return f"{named} answer, {who}emulated on this machine{as_if}"


def check_versions(survey: Survey) -> Iterator[Finding]:
    """Check for equal versions on all hosts, and for an equal driver of GPUs of one product."""
    hosts = list(survey.hosts.items())
    for host, facts in hosts[1:]:
        first, there = hosts[0][1].software, facts.software
        for name, severity in _MUST_AGREE.items():
            one, other = getattr(first, name), getattr(there, name)
            if _comparable(name, one) != _comparable(name, other):
                yield Finding(
                    severity=severity,
                    what=f"{name} is {other or 'not there'}, on {hosts[0][0]} {one or 'not there'}",
                    fix=_install(name, one),
                    host=host,
                )
    yield from _drivers(survey)


_MUST_AGREE = {
    "torch": Severity.ERROR,
    "cuda": Severity.ERROR,
    "nccl": Severity.ERROR,
    "transformers": Severity.WARNING,
    "python": Severity.NOTE,
}


def _comparable(name: str, version: str) -> str:
    """Reduce a Python version to its minor version, since patch releases compute alike."""
    return version.rpartition(".")[0] if name == "python" else version


def _install(name: str, version: str) -> str:
    if name in ("cuda", "nccl"):
        return f"install the wheel of torch that the first host has: {WHEELS}"
    if name == "python":
        return "use one version of Python everywhere"
    return f"pip install {name}=={version.partition('+')[0]}" if version else f"remove {name}"


def _drivers(survey: Survey) -> Iterator[Finding]:
    """Check drivers by product; a discovered cluster needs one driver version per device class."""
    by_product: dict[str, tuple[str, str]] = {}
    named = survey.job is not None and survey.job.named_cluster
    for host, facts in survey.hosts.items():
        driver = facts.software.driver
        products = {rank.product for rank in survey.on(host) if rank.has_gpu}
        for product in sorted(products):
            first, known = by_product.setdefault(product, (host, driver))
            if driver != known:
                yield Finding(
                    severity=Severity.NOTE if named else Severity.ERROR,
                    what=f"{product} has driver {driver}, on {first} {known}",
                    fix=f"install driver {known} there, or name the devices as two classes under "
                    "`cluster` in the job",
                    host=host,
                )


def describe_versions(survey: Survey) -> str:
    for facts in survey.hosts.values():
        there = facts.software
        cuda = f" for CUDA {there.cuda}, NCCL {there.nccl}" if there.cuda else ""
        return f"gpumix {there.gpumix}, torch {there.torch}{cuda}, Python {there.python}"
    return ""


def check_driver(survey: Survey) -> Iterator[Finding]:
    """Check that the driver supports the torch wheel's CUDA version."""
    for host, facts in _with_gpus(survey):
        wheel, known = facts.software.cuda, facts.software.driver_cuda
        if facts.software.rocm or facts.software.xpu:  # CUDA is not used there
            continue
        if not wheel:
            yield Finding(
                severity=Severity.ERROR,
                what=f"torch {facts.software.torch} has no CUDA built in",
                fix=f"install a wheel with CUDA: {WHEELS}",
                host=host,
            )
        elif known and parse_version(known)[0] < parse_version(wheel)[0]:
            yield Finding(
                severity=Severity.ERROR,
                what=f"driver {facts.software.driver} is for CUDA {known} and older, torch was "
                f"built for {wheel}",
                fix=f"install a newer driver, or a wheel for CUDA {known.partition('.')[0]}: "
                f"{WHEELS}",
                host=host,
            )


def describe_driver(survey: Survey) -> str:
    found = {f.software.driver: f.software.driver_cuda for _, f in _with_gpus(survey)}
    told = ", ".join(f"{name} (CUDA {cuda})" for name, cuda in sorted(found.items()) if name)
    return f"{told} run{'s' if len(found) == 1 else ''} this torch" if told else ""


def check_kernels(survey: Survey) -> Iterator[Finding]:
    """Check the torch wheel for each GPU's kernels, or for PTX compiled by the driver."""
    for rank in survey.gpus:
        facts = survey.hosts.get(rank.host)
        if facts is None or not facts.software.arches or not rank.capability:
            continue
        how = get_kernel_support(facts.software.arches, rank.capability)
        if how == "own":
            continue
        fitting = f"install a wheel of torch that has kernels for it: {WHEELS}"
        name = rank.product or rank.device_class
        yield Finding(
            severity=Severity.NOTE if how == "made" else Severity.ERROR,
            what=f"{name} has compute capability {rank.capability}, torch has "
            f"{' '.join(facts.software.arches)}"
            + (": the driver makes the kernels at the first start" if how == "made" else ""),
            fix=fitting if how == "none" else f"nothing is wrong; to save that time, {fitting}",
            host=rank.host,
            device=rank.device,
        )


def describe_kernels(survey: Survey) -> str:
    known = [r for r in survey.gpus if r.host in survey.hosts]
    capabilities = sorted({r.capability for r in known if r.capability})
    told = [host for host, facts in _with_gpus(survey) if facts.software.arches]
    if not capabilities or not told:
        return ""
    return f"torch has its own for compute capability {', '.join(capabilities)}"


def _with_gpus(survey: Survey) -> Iterator[tuple[str, HostFacts]]:
    hosts = {rank.host for rank in survey.gpus}
    return ((host, facts) for host, facts in survey.hosts.items() if host in hosts)
