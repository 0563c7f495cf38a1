"""Checks of host resources (disk, shared memory, memory, cores, limits) and settings. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumix.check.facts.cluster import FolderFacts, HostFacts, JobHostFacts, Survey
from gpumix.check.finding import Finding, Severity
from gpumix.hardware.host.environment import COPIES_PART
from gpumix.schema.units import show_bytes
from gpumix.train.memory_checkpoint.memory_folder import WITHOUT_COPIES

CACHE_BYTES = 2**30  # profiles, compiled code and other caches
TOKENS_PER_TEXT = 2  # upper bound of token file bytes per byte of text
SHM_BYTES = 2**27  # /dev/shm per device, for NCCL's buffers
MEMORY_BYTES = 2**31  # host memory per process: libraries, CUDA, batches
OPEN_FILES = 4096
PROCESSES = 4096
LOCKED_BYTES = 2**30  # memory locked for a network card


def check_disk(survey: Survey) -> Iterator[Finding]:
    """Check folders for write access and for free space for checkpoints and caches."""
    for host, facts in survey.hosts.items():
        for folder in facts.folders:
            key = (
                "--set output_dir=FOLDER"
                if folder.role == "output"
                else "export XDG_CACHE_HOME=FOLDER"
            )
            if folder.refusal:
                yield Finding(
                    severity=Severity.ERROR,
                    what=f"nothing can be written into {folder.path}: {folder.refusal}",
                    fix=f"let this user write there, or write elsewhere: {key}",
                    host=host,
                )
                continue
            yield from _room(survey, host, folder, key)
        job = _job_on(survey, host)
        if job is not None and job.shared is False:
            yield Finding(
                severity=Severity.ERROR,
                what="it does not see what the first host writes where the output goes",
                fix="choose an `output_dir` in the job on a file system that all hosts share",
                host=host,
            )


def _room(survey: Survey, host: str, folder: FolderFacts, key: str) -> Iterator[Finding]:
    needed, what, severity = _needed(survey, host, folder)
    if folder.free_bytes < needed:
        yield Finding(
            severity=severity,
            what=f"{show_bytes(folder.free_bytes)} are free for {folder.path}, {what}",
            fix=f"make room there, or write elsewhere: {key}",
            host=host,
            measured={"free_bytes": folder.free_bytes, "needed_bytes": needed},
        )


def _needed(survey: Survey, host: str, folder: FolderFacts) -> tuple[float, str, Severity]:
    """Return the required bytes, their purpose, and the severity of a shortage."""
    job = survey.job
    if folder.role == "cache":
        on_host = _job_on(survey, host)
        tokens = 0 if on_host is None else on_host.data_bytes * TOKENS_PER_TEXT
        needed = CACHE_BYTES + tokens
        return needed, f"caches and tokens may take {show_bytes(needed)}", Severity.WARNING
    if job is None or job.checkpoint_bytes is None:
        return 0, "", Severity.OK
    needed = job.checkpoints * job.checkpoint_bytes - job.saved_bytes
    return needed, describe_checkpoints(survey), Severity.ERROR


def describe_checkpoints(survey: Survey) -> str:
    """Describe the disk space of checkpoints."""
    job = survey.job
    if job is None or job.checkpoint_bytes is None:
        return ""
    size = show_bytes(job.checkpoint_bytes)
    together = show_bytes(job.checkpoints * job.checkpoint_bytes)
    return f"{job.checkpoints} checkpoints of {size} take {together}"


def describe_disk(survey: Survey) -> str:
    least: dict[str, float] = {}
    for facts in survey.hosts.values():
        for folder in facts.folders:
            least[folder.role] = min(folder.free_bytes, least.get(folder.role, folder.free_bytes))
    free = ", ".join(f"{show_bytes(size)} free for the {role}" for role, size in least.items())
    told = describe_checkpoints(survey)
    return f"{free}; {told}" if told else free


def collect_free_disk(survey: Survey) -> dict[str, float]:
    return {
        f"{host} {folder.role} free_bytes": folder.free_bytes
        for host, facts in survey.hosts.items()
        for folder in facts.folders
    }


def check_shared_memory(survey: Survey) -> Iterator[Finding]:
    """Check the size of /dev/shm, which is 64 MiB by default in containers."""
    for host, facts in survey.hosts.items():
        free = facts.shm_free_bytes
        if free is None:
            continue
        ranks = len(survey.on(host))
        needed = SHM_BYTES * ranks if ranks > 1 and _has_gpus(survey, host) else 0
        copies = _copies_on(survey, host)
        if free < needed:
            yield _shm(host, free, needed, f"{ranks} devices talk through it", Severity.WARNING)
        elif free < copies:
            said = f"copies of the state of its devices take {show_bytes(copies)}"
            without = f"{said}: without them {WITHOUT_COPIES}"
            yield _shm(host, free, copies, without, Severity.NOTE)


def _shm(host: str, free: int, needed: int, why: str, severity: Severity) -> Finding:
    gib = -(-2 * needed // 2**30)
    return Finding(
        severity=severity,
        what=f"{show_bytes(free)} are free in /dev/shm, {why}",
        fix=f"docker run --shm-size={gib}g, or sudo mount -o remount,size={gib}G /dev/shm",
        host=host,
        measured={"free_bytes": free, "needed_bytes": needed},
    )


def describe_shared_memory(survey: Survey) -> str:
    free = [f.shm_free_bytes for f in survey.hosts.values() if f.shm_free_bytes is not None]
    return f"{show_bytes(min(free))} free in /dev/shm" if free else ""


def state_on(survey: Survey, host: str) -> int:
    """Return the bytes of state on a host if all devices store equal shares; 0: unknown."""
    if survey.job is None or survey.job.checkpoint_bytes is None:
        return 0
    return survey.job.checkpoint_bytes * len(survey.on(host)) // max(1, len(survey.ranks))


def _copies_on(survey: Survey, host: str) -> int:
    """Return the bytes of a host's state copies, not counting a copy for a checkpoint."""
    return 0 if survey.job is None else survey.job.copies * state_on(survey, host)


def check_memory(survey: Survey) -> Iterator[Finding]:
    """Check host memory for processes, copies of the state, the extra copy during a checkpoint, and
    emulated devices."""
    yield from _emulated(survey)
    for host, facts in survey.hosts.items():
        ranks, free = len(survey.on(host)), facts.available_bytes
        needed = MEMORY_BYTES * ranks if _has_gpus(survey, host) else 0
        state, copies = state_on(survey, host), _copies_on(survey, host)
        fix = "end what else runs there, or give the container more: docker run --memory"
        room = COPIES_PART * free
        told, severity = "", Severity.NOTE
        if free < needed:
            told, severity = f"{ranks} processes take {show_bytes(needed)}", Severity.WARNING
        elif state > room:
            told = f"a copy of the state takes {show_bytes(state)}: training waits for checkpoints"
            fix += "; or save more rarely: save_steps"
        elif copies > room:
            told = f"copies of the state take {show_bytes(copies)}: without them {WITHOUT_COPIES}"
        if told:
            yield Finding(
                severity=severity,
                what=f"{show_bytes(free)} of its memory are free, {told}",
                fix=fix,
                host=host,
                measured={"available_bytes": free, "needed_bytes": needed + state + copies},
            )


def _emulated(survey: Survey) -> Iterator[Finding]:
    """Check memory for emulated devices, which all share the local machine's memory."""
    if not survey.hosts:
        return
    taken = sum(rank.memory_bytes for rank in survey.ranks)
    free = min(facts.available_bytes for facts in survey.hosts.values())
    if taken > free:
        yield Finding(
            severity=Severity.WARNING,
            what=f"emulated devices may take {show_bytes(taken)} together, {show_bytes(free)} of "
            "this machine's memory are free: one that fills up is ended by the system",
            fix="give their classes less `memory` in the cluster file, or emulate fewer devices",
            host=next(iter(survey.hosts)),
            measured={"available_bytes": free, "needed_bytes": taken},
        )


def describe_memory(survey: Survey) -> str:
    free = [facts.available_bytes for facts in survey.hosts.values()]
    return f"{show_bytes(min(free))} free on the host with the least" if free else ""


def collect_free_memory(survey: Survey) -> dict[str, float]:
    return {f"{host} available_bytes": f.available_bytes for host, f in survey.hosts.items()}


def check_cores(survey: Survey) -> Iterator[Finding]:
    """Check for a core per process; emulated devices share the available cores."""
    for host, facts in survey.hosts.items():
        ranks = len(survey.on(host))
        if facts.cores < ranks and not any(rank.emulated for rank in survey.on(host)):
            yield Finding(
                severity=Severity.WARNING,
                what=f"{facts.cores:g} cores for {ranks} processes, and for what reads their data",
                fix="give the container more: docker run --cpus; or more cores of the job's host",
                host=host,
                measured={"cores": facts.cores, "processes": ranks},
            )


def describe_cores(survey: Survey) -> str:
    real = {rank.host for rank in survey.ranks if not rank.emulated}
    shares = [f.cores / len(survey.on(h)) for h, f in survey.hosts.items() if h in real]
    return f"{min(shares):.3g} for each device" if shares else ""


def check_limits(survey: Survey) -> Iterator[Finding]:
    """Check limits on open files, processes, and memory locked for network cards."""
    for host, facts in survey.hosts.items():
        for what, fix, severity in _too_low(facts):
            yield Finding(severity=severity, what=what, fix=fix, host=host)


def _too_low(facts: HostFacts) -> Iterator[tuple[str, str, Severity]]:
    given = facts.limits
    if given.open_files is not None and given.open_files < OPEN_FILES:
        # A run raises its soft limit at start, but not the hard limit.
        may = given.most_open_files is None or given.most_open_files >= OPEN_FILES
        yield (
            f"a process may open {given.open_files} files; sockets and data need more",
            "ulimit -n 65536" if may else "raise nofile in /etc/security/limits.conf to 65536",
            Severity.WARNING,
        )
    if given.processes is not None and given.processes < PROCESSES:
        yield (
            f"this user may have {given.processes} processes and threads",
            "ulimit -u 65536, or raise nproc in /etc/security/limits.conf",
            Severity.WARNING,
        )
    if facts.rdma and given.locked_bytes is not None and given.locked_bytes < LOCKED_BYTES:
        yield (
            f"a process may lock {show_bytes(given.locked_bytes)} of memory, too little for "
            f"{', '.join(facts.rdma)} to write into",
            "ulimit -l unlimited (memlock in /etc/security/limits.conf), docker run --ulimit "
            "memlock=-1",
            Severity.WARNING,
        )


def describe_limits(survey: Survey) -> str:
    least = [f.limits.open_files for f in survey.hosts.values() if f.limits.open_files is not None]
    return f"{min(least)} open files" if least else ""


def check_settings(survey: Survey) -> Iterator[Finding]:
    """Check environment variables for disabled fast paths, missing interfaces, and differences."""
    for host, facts in survey.hosts.items():
        for name, (hinders, told) in _HINDERING.items():
            value = facts.settings.get(name, "")
            if value not in ("", "0", "OFF", "INFO") and hinders(survey, host, facts):
                yield _setting(host, f"{name}={value} {told}", f"unset {name}")
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            value = facts.settings.get(name, "")
            used = name.startswith("GLOO") or _has_gpus(survey, host)
            if value and used and not _names_one(value, facts.interfaces):
                yield Finding(
                    severity=Severity.ERROR,
                    what=f"{name}={value} names no interface of this host",
                    fix=f"name one of {', '.join(facts.interfaces)}, or unset {name}",
                    host=host,
                )
    yield from _differing(survey)


Hinders = Callable[[Survey, str, HostFacts], bool]


def _has_gpus(survey: Survey, host: str, _: HostFacts | None = None) -> bool:
    return any(rank.has_gpu for rank in survey.on(host))


def _several_gpus(survey: Survey, host: str, _: HostFacts) -> bool:
    return _has_gpus(survey, host) and len(survey.on(host)) > 1


def _fast_network(survey: Survey, host: str, facts: HostFacts) -> bool:
    return _has_gpus(survey, host) and len(survey.hosts) > 1 and bool(facts.rdma)


_HINDERING: dict[str, tuple[Hinders, str]] = {
    "NCCL_P2P_DISABLE": (_several_gpus, "keeps cards from copying to each other directly"),
    "NCCL_SHM_DISABLE": (_several_gpus, "sends what cards of one host say through the network"),
    "NCCL_IB_DISABLE": (_fast_network, "leaves the InfiniBand of this host unused"),
    "CUDA_LAUNCH_BLOCKING": (_has_gpus, "lets the host wait for each kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_has_gpus, "asks the driver for each tensor's memory"),
    "TORCH_DISTRIBUTED_DEBUG": (lambda *_: True, "checks every collective, which is slow"),
}
# Suffixes of variables allowed to differ between hosts.
_OWN = ("_IFNAME", "_HCA", "_DEBUG", "_FILE", "_RANK", "_HOSTID", "_COMM_ID")


def _setting(host: str, what: str, fix: str) -> Finding:
    return Finding(severity=Severity.WARNING, what=what, fix=fix, host=host)


def _names_one(value: str, interfaces: tuple[str, ...]) -> bool:
    """Match interfaces as NCCL does: prefixes of names, "=" for exact names, "^" for exclusions."""
    if value.startswith("^") or not interfaces:
        return True
    exact = value.startswith("=")
    named = [name for name in value.lstrip("=").split(",") if name]
    return any(
        there == name or (not exact and there.startswith(name))
        for name in named
        for there in interfaces
    )


def _differing(survey: Survey) -> Iterator[Finding]:
    hosts = list(survey.hosts.items())
    for host, facts in hosts[1:]:
        first = hosts[0][1].settings
        for name in sorted({*first, *facts.settings}):
            one, other = first.get(name), facts.settings.get(name)
            if name.startswith("NCCL_") and not name.endswith(_OWN) and one != other:
                yield _setting(
                    host,
                    f"{name} is {other or 'not set'}, on {hosts[0][0]} {one or 'not set'}: ranks "
                    "that talk in unlike ways may hang",
                    f"export {name} alike on all hosts, or unset it",
                )


def describe_settings(survey: Survey) -> str:
    told = {f"{k}={v}" for facts in survey.hosts.values() for k, v in facts.settings.items()}
    return f"nothing that hinders: {', '.join(sorted(told))}" if told else ""


def _job_on(survey: Survey, host: str) -> JobHostFacts | None:
    return None if survey.job is None else survey.job.on_hosts.get(host)
