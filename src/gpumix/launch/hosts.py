"""Hosts of a launch as named by the user, and the ranks of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError
from gpumix.schema.file_errors import explain_unreadable
from gpumix.schema.files import MARK_BYTES, read_text
from gpumix.schema.untrusted_text import check_host_name
from gpumix.schema.value import refuse_duplicates

_COUNTED = re.compile(r"(?P<name>[^\s:]+)(?::(?P<count>\d+)|\s+slots=(?P<slots>\d+))?")
LOCALHOST = "localhost"
HOSTS_FIX = "--hosts a,b or --hosts a:4,b:8, or a file with one of them on each line"


@dataclass(frozen=True)
class Host:
    """A host: `name` as known to ssh; `processes` if given by the user."""

    name: str
    processes: int | None = None

    @property
    def name_without_user(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True)
class HostRanks:
    """The ranks of a host: the number of processes and the first rank."""

    host: Host
    first: int
    processes: int

    @property
    def ranks(self) -> str:
        last = self.first + self.processes - 1
        return f"rank {self.first}" if last == self.first else f"ranks {self.first} to {last}"


def read_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts in `a,b:4`, or in a file of that name: one per line, with `:4` or `
    slots=4`.

    Raises:
        InputError: a name is invalid or repeated, or there is none; or the file cannot be read.
    """
    file = Path(text)
    from_file = "," not in text and file.exists() and not file.is_dir()
    lines = _lines(file) if from_file else text.split(",")
    words = [line.partition("#")[0].strip() for line in lines]
    hosts = tuple(_host(word, f"--hosts {text}") for word in words if word or not from_file)
    if not hosts:
        raise InputError(
            "no host is named", code="no-hosts", where=f"--hosts {text}", fix=HOSTS_FIX
        )
    try:
        refuse_duplicates("host", (host.name for host in hosts))
    except ValueError as error:
        raise InputError(
            str(error), code="host-named-twice", where=f"--hosts {text}", fix=HOSTS_FIX
        ) from error
    return hosts


def _lines(file: Path) -> list[str]:
    try:
        return read_text(file, MARK_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "cannot read the hosts file",
            code="hosts-file-unreadable",
            where=f"--hosts {file}",
            why=explain_unreadable(error),
            fix=HOSTS_FIX,
        ) from error


def _host(word: str, where: str) -> Host:
    found = _COUNTED.fullmatch(word)
    try:
        user, _, name = found["name"].rpartition("@") if found else ("", "", "")
        check_host_name(name)
        check_host_name(user or name)
    except ValueError as error:
        raise InputError(
            f"'{word}' names no host", code="host-name-invalid", where=where, fix=HOSTS_FIX
        ) from error
    assert found is not None, "it has a name"
    count = found["count"] or found["slots"]
    if count is not None and not int(count):
        raise InputError(
            f"host '{found['name']}' is to run no process",
            code="host-without-processes",
            where=where,
            fix=HOSTS_FIX,
        )
    return Host(found["name"], int(count) if count is not None else None)


def get_cluster_hosts(cluster: Cluster) -> tuple[Host, ...]:
    """Return the hosts of a cluster, with a process for each device.

    Raises:
        InputError: it names none.
    """
    counts = _count_devices_by_host(cluster)
    if not counts:
        raise InputError(
            "the cluster file names no hosts",
            code="cluster-without-hosts",
            fix="give its devices a `host`, as ssh knows it, or name them: --hosts a,b",
        )
    return tuple(Host(name, count) for name, count in counts.items())


def sort_by_rank(hosts: Sequence[Host], cluster: Cluster | None) -> tuple[Host, ...]:
    """Return the hosts in the order of their ranks: rank r has the cluster's r-th device.

    Raises:
        InputError: they are not the cluster's.
    """
    counts = _count_devices_by_host(cluster)
    if not counts:
        return tuple(hosts)
    by_name = {host.name_without_user: host for host in hosts}
    if set(by_name) != set(counts):
        raise InputError(
            "the hosts are not those of the cluster",
            code="hosts-not-of-cluster",
            why=f"it names {', '.join(counts)}; --hosts names {', '.join(by_name)}",
            fix="name the same in both",
        )
    return tuple(by_name[name] for name in counts)


def find_uncounted(hosts: Sequence[Host], cluster: Cluster | None) -> list[str]:
    """Return the hosts with devices still to be counted."""
    return (
        []
        if _count_devices_by_host(cluster)
        else [host.name for host in hosts if host.processes is None]
    )


def assign_known_ranks(
    hosts: Sequence[Host], cluster: Cluster | None, *, where: str
) -> tuple[HostRanks, ...]:
    """Return the ranks of each host, in rank order, without asking hosts for their devices.

    Raises:
        InputError: see `assign_ranks` and `sort_by_rank`; or a host's number of processes is not
        given.
    """
    hosts = sort_by_rank(hosts, cluster)
    if missing := find_uncounted(hosts, cluster):
        raise InputError(
            f"how many processes {', '.join(missing)} run is not said, and no host is asked",
            code="process-count-missing",
            where=where,
            fix=f"--hosts {','.join(f'{name}:4' for name in missing)}, or a cluster that names "
            "them",
        )
    return assign_ranks(hosts, cluster, {})


def _count_devices_by_host(cluster: Cluster | None) -> Counter[str]:
    """Count devices by host, in rank order; empty if the cluster names no hosts."""
    devices = () if cluster is None else cluster.in_rank_order()
    counts = Counter(device.host for device in devices)
    return Counter() if set(counts) == {LOCALHOST} else counts


def assign_ranks(
    hosts: Sequence[Host], cluster: Cluster | None, found: Mapping[str, int]
) -> tuple[HostRanks, ...]:
    """Return the ranks of each host: as many as given, or the devices in the cluster, or the
    devices found.

    Args:
        hosts: ordered by `sort_by_rank`.
        found: devices by the names of hosts.

    Raises:
        InputError: the hosts have other numbers of devices than the cluster.
    """
    counts = _count_devices_by_host(cluster)
    places: list[HostRanks] = []
    first = 0
    for host in hosts:
        known = counts[host.name_without_user] if counts else found.get(host.name, 0)
        if counts and host.processes not in (None, known):
            raise InputError(
                f"host '{host.name}' has {known} devices in the cluster, and --hosts says "
                f"{host.processes}",
                code="process-count-mismatch",
                fix=f"--hosts {host.name}:{known}, or leave the number out",
            )
        number = host.processes or known
        places.append(HostRanks(host, first, number))
        first += number
    if cluster is not None and first != len(cluster.devices):
        raise InputError(
            f"the cluster has {len(cluster.devices)} devices, the hosts run {first} processes",
            code="process-count-mismatch",
            why=", ".join(f"{place.host.name}: {place.processes}" for place in places),
            fix="say how many each host runs, as many as the cluster has devices together; or give "
            "its devices a `host`",
        )
    return tuple(places)
