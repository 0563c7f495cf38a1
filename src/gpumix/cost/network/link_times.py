"""Duration of one collective: measured, or computed from stated links.

A stated link gives the seconds of one message. A ring of n devices moves its buffer in n - 1 steps
of an nth each, at the speed of its slowest link (Patarasuk and Yuan, JPDC 2009). Over several hosts
NCCL uses either one ring through all devices, or one between hosts and then one inside each; the
faster counts. For an all-reduce between hosts, the faster of a ring and two trees counts. Unequal
intervals take one broadcast, or one reduction, per owner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Literal, Protocol

from gpumix.cost.identity import ByIdentity
from gpumix.cost.memory_layout.curves import interpolate_one_seconds
from gpumix.cost.pipeline_schedule import NO_TRANSFER, Transfer
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.cluster.link_islands import (
    Near,
    count_largest_island,
    find_smallest_place,
    get_link_ends,
)
from gpumix.schema.cluster.network import Link, Network, Where
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.profile.profile import (
    CollectiveTimes,
    Profile,
    RankGroup,
    TensorParallelOperation,
)

# Devices of each class on each host.
OnHosts = Mapping[str, Mapping[str, int]]
Operation = Literal["gather", "reduce", "sum"]

# Per-owner collectives compared to the native one, on NCCL: Cephalo's planning constant (arXiv
# 2411.01075).
PER_OWNER = 1.25

# Largest piece that NCCL's trees forward at a time: an eighth of its buffer of 4 MiB.
TREE_PIECE_BYTES = 2**19


class LinkModel(Protocol):
    """Links between the ranks of a plan."""

    def seconds(self, operation: Operation, form: str, group: RankGroup, size: float) -> float:
        """Return the seconds of one collective of `size` bytes in all; for a padded form, pass the
        padded size of the native form.

        Raises:
            InputError: nothing is known of this form.
        """

    def knows(self, operation: Operation, form: str, group: RankGroup) -> bool:
        """Check if the seconds of this form are known."""


@dataclass(frozen=True)
class FreeLinks:
    """Collectives without duration: for one rank, or without a network."""

    def seconds(self, operation: Operation, form: str, group: RankGroup, size: float) -> float:
        return 0.0

    def knows(self, operation: Operation, form: str, group: RankGroup) -> bool:
        return group == "all" and form not in ("native", "padded")


@dataclass(frozen=True)
class TimedCollectives:
    """Collectives timed between the ranks of the cluster."""

    times: tuple[CollectiveTimes, ...]

    def seconds(self, operation: Operation, form: str, group: RankGroup, size: float) -> float:
        if group == "all" and not self._of(operation, group):
            return 0.0
        for times in self._of(operation, group):
            if times.form == form:
                return interpolate_one_seconds(times.times, size)
        known = ", ".join(sorted(t.form for t in self._of(operation, group))) or "none"
        raise InputError(
            f"the profile has no times for the '{form}' form of {operation} of {group} ranks",
            code="collective-not-measured",
            why=f"it holds {known}, but this plan needs '{form}'",
            fix="profile again on this cluster: `gpumix profile JOB.yaml`",
        )

    def knows(self, operation: Operation, form: str, group: RankGroup) -> bool:
        return any(t.form == form for t in self._of(operation, group))

    def _of(self, operation: Operation, group: RankGroup) -> list[CollectiveTimes]:
        return [t for t in self.times if t.operation == operation and t.group == group]


@dataclass(frozen=True)
class StatedLinks:
    """Collectives over stated links between devices in hosts.

    `inside` has the number of devices of a host and their link, once for all equal hosts; `between`
    is the slowest link between two hosts, None if there is only one host.
    """

    inside: tuple[tuple[int, Link], ...]
    between: Link | None
    hosts: int
    ranks: int

    @classmethod
    def of(cls, network: Network, on_host: OnHosts, near: Near = "all") -> StatedLinks:
        """Return the links between the devices on these hosts, at network distance `near`.

        Raises:
            InputError: no link is stated between some of them.
        """
        kinds = {kind: len(hosts) for kind, hosts in group_equal_hosts(on_host).items()}
        inside = []
        for kind in kinds:
            count = sum(n for _, n in kind)
            if count > 1:
                where: Where = "island" if near == "island" else "inside"
                inside.append((count, _slowest(network, where, _list_pairs_on_host(kind))))
        between = None
        if len(on_host) > 1:
            where = "rack" if near == "rack" else "between"
            between = _slowest(network, where, _list_pairs_across_hosts(kinds))
        ranks = sum(alike * count for kind, alike in kinds.items() for _, count in kind)
        return cls(tuple(inside), between, len(on_host), ranks)

    def seconds(self, operation: Operation, form: str, group: RankGroup, size: float) -> float:
        if group == "across":  # an all-reduce: replicas sum their reduced gradients
            return 2 * min(self._between(size), self._tree(size))
        whole = self._inside(size) if group == "inside" else self._everywhere(size)
        return whole * (PER_OWNER if form in ("list", "broadcast", "all_to_all") else 1.0)

    def knows(self, operation: Operation, form: str, group: RankGroup) -> bool:
        if operation == "sum":  # predicted as a reduction and a gather
            return False
        return form in ("native", "list") and (self.hosts > 1 or group == "all")

    def _everywhere(self, size: float) -> float:
        if self.between is None:
            return self._inside(size)
        ring = (self.ranks - 1) * self._slowest_step(size / self.ranks)
        return min(ring, self._between(size) + self._inside(size))

    def _slowest_step(self, size: float) -> float:
        links = [link for _, link in self.inside]
        links += [self.between] if self.between is not None else []
        return max(interpolate_one_seconds(link.times, size) for link in links)

    def _inside(self, size: float) -> float:
        return max(
            ((n - 1) * interpolate_one_seconds(link.times, size / n) for n, link in self.inside),
            default=0.0,
        )

    def _between(self, size: float) -> float:
        if self.between is None:
            return 0.0
        return (self.hosts - 1) * interpolate_one_seconds(self.between.times, size / self.hosts)

    def _tree(self, size: float) -> float:
        """Return the seconds from all hosts to one, or from one to all, over two trees sharing the
        work (Sanders, Speck and Traeff, Parallel Computing 2009; in NCCL since 2.4). The buffer
        passes each link once, in pipelined pieces, and the first piece climbs all levels."""
        if self.between is None:
            return 0.0
        stream = interpolate_one_seconds(self.between.times, size)
        piece = interpolate_one_seconds(self.between.times, min(size, TREE_PIECE_BYTES))
        return stream + math.ceil(math.log2(self.hosts)) * piece


@dataclass(frozen=True)
class MeasuredOrStatedLinks:
    """Measured times, with stated links for unmeasured groups of ranks."""

    measured: TimedCollectives
    stated: StatedLinks

    def seconds(self, operation: Operation, form: str, group: RankGroup, size: float) -> float:
        return self._for(operation, group).seconds(operation, form, group, size)

    def knows(self, operation: Operation, form: str, group: RankGroup) -> bool:
        return self._for(operation, group).knows(operation, form, group)

    def _for(self, operation: Operation, group: RankGroup) -> LinkModel:
        found = any(t.operation == operation and t.group == group for t in self.measured.times)
        return self.measured if found else self.stated


@dataclass(frozen=True)
class RescaledCollectives:
    """Collectives of `ranks` ranks, derived from times between `timed` ranks: a ring's steps take
    equally long, but there are fewer, and each moves a larger part."""

    measured: TimedCollectives
    group: RankGroup
    timed: int
    ranks: int

    def seconds(self, operation: Operation, form: str, group: RankGroup, size: float) -> float:
        as_large = size * self.timed / self.ranks
        whole = self.measured.seconds(operation, form, self.group, as_large)
        return whole * (self.ranks - 1) / (self.timed - 1)

    def knows(self, operation: Operation, form: str, group: RankGroup) -> bool:
        return group == "all" and self.measured.knows(operation, form, self.group)


class CachedLinkModel:
    """Wire with a cache for repeated queries."""

    def __init__(self, wire: LinkModel) -> None:
        self._wire = wire
        self._known: dict[tuple[Operation, str, RankGroup, float], float] = {}

    def seconds(self, operation: Operation, form: str, group: RankGroup, size: float) -> float:
        asked = (operation, form, group, size)
        if asked not in self._known:
            self._known[asked] = self._wire.seconds(*asked)
        return self._known[asked]

    def knows(self, operation: Operation, form: str, group: RankGroup) -> bool:
        return self._wire.knows(operation, form, group)


def count_devices_by_host(places: Iterable[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Count the devices of each class on each host, from the host and class of each device."""
    found: dict[str, dict[str, int]] = {}
    for (host, name), count in Counter(places).items():
        found.setdefault(host, {})[name] = count
    return found


def group_equal_hosts(on_host: OnHosts) -> dict[tuple[tuple[str, int], ...], list[str]]:
    """Group hosts by their devices."""
    kinds: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for host in sorted(on_host):
        kinds.setdefault(tuple(sorted(on_host[host].items())), []).append(host)
    return kinds


def build_link_model(profile: Profile, on_host: OnHosts, near: Near = "all") -> LinkModel:
    """Return the links between the devices on these hosts, at network distance `near`, from the
    profile or its cluster."""
    if sum(sum(counts.values()) for counts in on_host.values()) == 1:
        return FreeLinks()
    network, measured = profile.cluster.network, TimedCollectives(profile.network)
    if network is None:
        return measured if profile.network else FreeLinks()
    stated = StatedLinks.of(network, on_host, near)
    return MeasuredOrStatedLinks(measured, stated) if profile.network else stated


def build_subset_link_model(
    profile: Profile, places: Sequence[tuple[str, str]], near: Near = "all"
) -> LinkModel:
    """Return the links between some of the cluster's devices, from host and class of each. Times
    between all devices, or inside hosts, islands or racks, apply to fewer devices.

    Args:
        near: the network distance between the devices.
    """
    network, measured = profile.cluster.network, TimedCollectives(profile.network)
    every = profile.cluster.devices
    form = profile.collectives.gather
    if len(places) > 1 and near in ("island", "rack") and measured.knows("gather", form, near):
        return RescaledCollectives(measured, near, count_largest_island(every, near), len(places))
    hosts = {host for host, _ in places}
    if len(places) == 1 or len(places) == len(every) or not profile.network:
        return build_link_model(profile, count_devices_by_host(places), near)
    timed = Counter(device.host for device in every).most_common(1)[0][1]
    if len(hosts) == 1 and measured.knows("gather", form, "inside"):
        return RescaledCollectives(measured, "inside", timed, len(places))
    if network is not None and not measured.knows("gather", form, "all"):
        return StatedLinks.of(network, count_devices_by_host(places), near)
    return RescaledCollectives(measured, "all", len(every), len(places))


def compute_tensor_parallel_s(
    profile: Profile,
    operation: TensorParallelOperation,
    name: str,
    degree: int,
    size: float,
) -> float:
    """Return the seconds of one collective of a tensor-parallel group: `degree` devices of a class
    on one host, each giving `size` bytes. An untimed all-reduce counts as a reduction and a gather,
    an untimed gather or reduction as half an all-reduce; an exchange is a gather."""
    timed = {"all_reduce": "sum", "exchange": "tp_gather", "reduce": "tp_reduce"}[operation]
    whole = size * degree if operation == "exchange" else size
    for times in profile.network:
        if (times.operation, times.form) == (timed, str(degree)):
            return interpolate_one_seconds(times.times, whole)
    if operation != "all_reduce":
        return compute_tensor_parallel_s(profile, "all_reduce", name, degree, whole) / 2
    in_islands = _is_in_islands(ByIdentity(profile.cluster), name)
    among: Near = "island" if in_islands else "inside"
    wire, forms = (
        build_subset_link_model(profile, [("", name)] * degree, among),
        select_collective_forms(profile),
    )
    if not wire.knows("reduce", forms.reduce, "all"):
        return 0.0
    reduced = wire.seconds("reduce", forms.reduce, "all", size)
    return reduced + wire.seconds("gather", forms.gather, "all", size)


@lru_cache(maxsize=64)
def _is_in_islands(of: ByIdentity[Cluster], name: str) -> bool:
    """Return True if all devices of a class are in islands."""
    return all(device.island for device in of.value.devices if device.device_class == name)


class Messages:
    """Seconds of one message between two devices, as timed or by stated links.

    Args:
        moved: communication takes time.
    """

    def __init__(self, profile: Profile, moved: bool = True) -> None:
        self._profile = profile
        self._moved = moved
        self._curves: dict[Hashable, Curve | None] = {}

    def transfer(self, giver: Device, taker: Device, size: float) -> Transfer:
        """Return the transfer of `size` bytes. Messages from one host to another are serialized.

        Raises:
            InputError: no link is stated between the two.
        """
        if not self._moved:
            return NO_TRANSFER
        over = None if giver.host == taker.host else (giver.host, taker.host)
        return Transfer(self.seconds(giver, taker, size), over)

    def seconds(self, giver: Device, taker: Device, size: float) -> float:
        """Return the seconds of `size` bytes between two devices."""
        link = self.link(giver, taker)
        if link not in self._curves:
            self._curves[link] = self._times(giver, taker)
        curve = self._curves[link]
        return 0.0 if curve is None else interpolate_one_seconds(curve, size)

    def link(self, giver: Device, taker: Device) -> Hashable:
        """Return a key, equal for equally fast links."""
        if self._profile.links.times(giver, taker) is not None:
            return get_link_ends(giver, taker)
        return find_smallest_place((giver, taker)), giver.device_class, taker.device_class

    def timed(self, giver: Device, taker: Device) -> Curve | None:
        """Return the measured curve; None if not measured."""
        timed = self._profile.links.times(giver, taker)
        if timed is not None:
            return timed
        group = "inside" if giver.host == taker.host else "across"
        for times in self._profile.network:
            if (times.operation, times.group) == ("send", group):
                return times.times
        return None

    def _times(self, giver: Device, taker: Device) -> Curve | None:
        """Return the curve of a link; None if nothing is known of any link."""
        timed = self.timed(giver, taker)
        network, where = self._profile.cluster.network, find_smallest_place((giver, taker))
        if timed is not None or network is None:
            return timed
        pair = (giver.device_class, taker.device_class)
        return _slowest(network, "between" if where == "all" else where, [pair]).times


def select_collective_forms(profile: Profile) -> Collectives:
    """Return the forms for unequal intervals: the fastest by measurement, or NCCL's lists."""
    if profile.cluster.network is not None and not profile.network:
        return Collectives(gather="list", reduce="list")
    return profile.collectives


def _list_pairs_on_host(kind: tuple[tuple[str, int], ...]) -> list[tuple[str, str]]:
    """Return pairs of classes with two devices on one host."""
    names = [name for name, _ in kind]
    return [*((name, name) for name, count in kind if count > 1), *combinations(names, 2)]


def _list_pairs_across_hosts(
    kinds: Mapping[tuple[tuple[str, int], ...], int],
) -> list[tuple[str, str]]:
    """Return pairs of classes on two different hosts."""
    hosts_with: Counter[str] = Counter()
    together: Counter[tuple[str, str]] = Counter()
    for kind, count in kinds.items():
        names = [name for name, _ in kind]
        hosts_with.update(dict.fromkeys(names, count))
        together.update(dict.fromkeys(combinations(names, 2), count))
    names = sorted(hosts_with)
    alike = [(name, name) for name in names if hosts_with[name] > 1]
    unlike = [
        (a, b)
        for a, b in combinations(names, 2)
        if hosts_with[a] * hosts_with[b] > together[a, b]  # otherwise both share their only host
    ]
    return alike + unlike


@lru_cache(maxsize=4096)
def _find_link(of: ByIdentity[Network], where: Where, one: str, other: str) -> Link | None:
    return of.value.of(where, one, other)


def _slowest(network: Network, where: Where, pairs: list[tuple[str, str]]) -> Link:
    links, known = [], ByIdentity(network)
    for one, other in pairs:
        link = _find_link(known, where, one, other)
        if link is None:
            where = "inside" if where in ("island", "inside") else "between"
            place = "inside hosts" if where == "inside" else "between hosts"
            raise InputError(
                f"no link is stated {place} between {one} and {other}",
                code="link-not-stated",
                where="cluster: network",
                fix=f"give `network: {{{where}: ...}}`, such as 25GbE, pcie4 or '12 GB/s'",
            )
        links.append(link)
    return min(links, key=lambda link: link.largest_bytes_per_s)
