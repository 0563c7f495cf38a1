"""Implementation of `gpumix launch`: on this host, or on several after a probe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpumix.hardware.host.environment import CLUSTER, use_settings
from gpumix.launch.commands import (
    LaunchEnvironment,
    RendezvousAddress,
    Ssh,
    make_host_line,
    shell_line,
)
from gpumix.launch.hosts import (
    LOCALHOST,
    Host,
    HostRanks,
    assign_known_ranks,
    assign_ranks,
    find_uncounted,
    sort_by_rank,
)
from gpumix.launch.orders import Orders
from gpumix.launch.probes.readiness import check_rendezvous, refuse_unready
from gpumix.launch.probes.survey import gather_local_facts, probe_hosts, resolve_host_name
from gpumix.launch.program import Program
from gpumix.launch.ranks import host_launcher, several_hosts
from gpumix.launch.ranks.host_ranks import HostAssignment
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError
from gpumix.train.console.terminal import get_stderr_console

PORT = 29500  # where no host is asked for a free port


@dataclass(frozen=True)
class LaunchRequest:
    """Request of a launch: program, hosts and devices. `cluster_file` names the devices of a
    program; a job naming its own does not need it."""

    program: Program
    around: LaunchEnvironment
    hosts: tuple[Host, ...] = ()
    cluster: Cluster | None = None
    cluster_file: Path | None = None
    processes: int | None = None
    ssh: Ssh = field(default_factory=Ssh)
    address: str | None = None
    port: int | None = None
    logs: Path | None = None
    as_json: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        """Files required on each host."""
        named = () if self.cluster_file is None else (str(self.cluster_file),)
        return (*self.program.files, *named)


@dataclass(frozen=True)
class LaunchResult:
    """Result of a launch: an exit code, a message, and the value of `--json`."""

    code: int
    said: str
    value: dict[str, Any]


def pass_cluster(asked: LaunchRequest, *, scheduled: bool) -> LaunchRequest:
    """Return the request with the cluster passed to the program: to a job by its key, otherwise by
    the environment.

    Args:
        scheduled: a scheduler chooses the hosts, so ranks detect their GPUs themselves.
    """
    job = asked.program.kind == "job"
    classes = asked.cluster.classes if asked.cluster is not None else ()
    if scheduled and any(one.is_gpu for one in classes):
        auto = asked.program.with_arguments("--set", "cluster=auto")
        return replace(asked, program=auto if job else asked.program, cluster_file=None)
    if asked.cluster_file is None:
        return asked
    file = str(asked.around.folder / asked.cluster_file)
    if job:
        return replace(asked, program=asked.program.with_arguments("--set", f"cluster={file}"))
    settings = {**asked.around.settings, CLUSTER: file}
    return replace(asked, around=replace(asked.around, settings=settings))


# -- one host --------------------------------------------------------------------------------------


def launch_locally(asked: LaunchRequest) -> LaunchResult:
    """Run a program on all devices of this host."""
    use_settings(asked.around.settings)
    processes = count_local_processes(asked)
    if get_stderr_console().is_interactive:  # a script is silent while it imports
        count = f"{processes} process{'es' if processes > 1 else ''}"
        host_launcher.print_line(2, f"gpumix: starting {count} on this host")
    share = HostAssignment(0, processes, processes, host_launcher.LOOPBACK, asked.port or 0)
    orders = Orders()
    with orders.take_signals():
        code, told = host_launcher.run_host_ranks(
            share,
            asked.program.words,
            orders,
            grace_s=asked.around.grace_s,
            take=_to_stderr if asked.as_json else None,
        )
    place = HostRanks(Host(LOCALHOST), 0, processes)
    return LaunchResult(code, f"gpumix: {told}" if told else "", _value(code, [(place, code)]))


def count_local_processes(asked: LaunchRequest) -> int:
    """Return the number of a program's processes on this host, equal to the devices.

    Raises:
        InputError: the cluster has another number of devices.
    """
    if asked.cluster is None:
        from gpumix.hardware.discovery.discover import discover_cluster

        return asked.processes or len(discover_cluster().devices)
    devices = len(asked.cluster.devices)
    if asked.processes not in (None, devices):
        raise InputError(
            f"the cluster has {devices} devices, and --processes says {asked.processes}",
            code="process-count-mismatch",
            where=str(asked.cluster_file),
            fix="leave --processes out",
        )
    return devices


def _to_stderr(to: int, line: str) -> None:
    host_launcher.print_line(2, line)


# -- several hosts ---------------------------------------------------------------------------------


def launch_on_hosts(asked: LaunchRequest) -> LaunchResult:
    """Run a program on several hosts, once all are ready.

    Raises:
        GpumixError: a host is not; nothing is started.
    """
    places, meeting = prepare_hosts(asked)
    program = asked.program
    if asked.as_json and program.kind == "job":
        program = program.with_arguments("--json")
    remote = _make_host_lines(places, replace(asked, program=program), meeting, led=True)
    commands = {place: asked.ssh.command(place.host, words) for place, words in remote.items()}
    data: list[str] | None = [] if asked.as_json else None
    gathered = several_hosts.GatheredOutput([place.host.name for place in places], asked.logs, data)
    meet = f"they meet at {meeting.address}:{meeting.port}"
    parts = [f"{place.ranks} on {place.host.name}" for place in places]
    host_launcher.print_line(2, f"gpumix: {', '.join(parts)}; {meet}")
    orders = Orders()
    try:
        with orders.take_signals():
            outcome = several_hosts.run_on_hosts(
                commands, orders, gathered.take, grace_s=asked.around.grace_s
            )
    finally:
        gathered.close()
    error = several_hosts.explain_failure(outcome, asked.logs)
    value = _value(outcome.code, [(ended.place, ended.code) for ended in outcome.hosts])
    if program.kind == "job" and data:
        with suppress(ValueError):  # the job's code may print too
            value["summary"] = json.loads(data[-1])
    said = f"gpumix: {error}" if error is not None else ""
    return LaunchResult(
        outcome.code, said or ("gpumix: interrupted" if outcome.code else ""), value
    )


def prepare_hosts(asked: LaunchRequest) -> tuple[tuple[HostRanks, ...], RendezvousAddress]:
    """Probe all hosts and refuse unready ones; return the ranks of each host, and the
    rendezvous."""
    hosts = sort_by_rank(asked.hosts, asked.cluster)
    files = asked.files
    address = asked.address or resolve_host_name(hosts[0], asked.ssh)
    questions: dict[str, dict[str, object]] = {one.name: {"files": files} for one in hosts}
    questions[hosts[0].name] |= {"address": address, "port": asked.port or 0}
    found = probe_hosts(hosts, asked.ssh, asked.around, questions)
    counted = find_uncounted(hosts, asked.cluster)
    refuse_unready(found, gather_local_facts(files), counted=counted)
    devices = {name: facts.devices for name, facts in found.items()}
    numbers = {name: number for name, number in devices.items() if isinstance(number, int)}
    places = assign_ranks(hosts, asked.cluster, numbers)
    first = hosts[0].name
    return places, check_rendezvous(address, found[first], host=first, alone=len(hosts) == 1)


def _make_host_lines(
    places: Sequence[HostRanks], asked: LaunchRequest, meeting: RendezvousAddress, *, led: bool
) -> dict[HostRanks, str]:
    world = sum(place.processes for place in places)
    return {
        place: make_host_line(
            place, asked.program, asked.around, world=world, meeting=meeting, led=led
        )
        for place in places
    }


def _value(code: int, hosts: Sequence[tuple[HostRanks, int | None]]) -> dict[str, Any]:
    rows: list[Mapping[str, Any]] = [
        {
            "host": place.host.name,
            "first_rank": place.first,
            "processes": place.processes,
            "exit_code": ended,
        }
        for place, ended in hosts
    ]
    return {"exit_code": code, "hosts": rows}


# -- by hand ---------------------------------------------------------------------------------------


def commands_of(asked: LaunchRequest) -> list[tuple[str, str]]:
    """Return a shell line per host running its part; no host is contacted.

    Raises:
        InputError: a host's number of processes is not given.
    """
    if not asked.hosts:
        return [(LOCALHOST, _command_here(asked))]
    places = assign_known_ranks(asked.hosts, asked.cluster, where="--print-commands")
    meeting = RendezvousAddress(
        asked.address or resolve_host_name(places[0].host, asked.ssh), asked.port or PORT
    )
    remote = _make_host_lines(places, asked, meeting, led=False)
    return [
        (place.host.name, asked.ssh.make_interactive_line(place.host, line))
        for place, line in remote.items()
    ]


def _command_here(asked: LaunchRequest) -> str:
    if asked.program.kind == "job":
        return shell_line(asked.around, Host(LOCALHOST), asked.program.words)
    place = HostRanks(Host(LOCALHOST), 0, count_local_processes(asked))
    meeting = RendezvousAddress(host_launcher.LOOPBACK, asked.port or PORT)
    return make_host_line(
        place, asked.program, asked.around, world=place.processes, meeting=meeting, led=False
    )
