"""The devices that a plan may use: counted by class and host, so that leaving some out is cheap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, combinations_with_replacement, product
from math import comb, prod

from gpumix.cost.time import can, chunks_cost_nothing
from gpumix.cost.wire import OnHosts, Remembered, Wire, like_hosts, on_hosts, wire_for
from gpumix.spec.cluster import Device
from gpumix.spec.dtypes import communication_dtype
from gpumix.spec.profile import Profile
from gpumix.spec.stage import ComputeDtype, Mode

FEW_CLASSES = 4  # of which all subsets are tried
FEW_HOSTS = 8  # of a kind: one more or less may matter
MOST_FLEETS = 64  # ways to leave devices out: up to so many all are tried


@dataclass(frozen=True)
class Pool:
    """Devices that divide one copy of the state between them, and others that are just like them.

    `classes` has the devices of each class, one tuple for each of the like pools, by id.
    """

    classes: tuple[tuple[str, tuple[tuple[Device, ...], ...]], ...]

    @property
    def alike(self) -> int:
        """How many such pools there are."""
        return len(self.classes[0][1])

    @property
    def size(self) -> int:
        """Devices in one of them."""
        return sum(len(devices[0]) for _, devices in self.classes)


@dataclass(frozen=True)
class Fleet:
    """Chosen devices of a profile, and the links between them: what all settings of a search share.

    `everyone` are all devices in rank order; those take part that are in `classes`, which has them
    by id, the classes by name. `on_host` counts them.
    """

    profile: Profile
    everyone: tuple[Device, ...]
    classes: Mapping[str, tuple[Device, ...]]
    on_host: OnHosts
    _measured: dict[tuple[Mode, ...], dict[str, tuple[Mode, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, profile: Profile, devices: tuple[Device, ...]) -> Fleet:
        """All of these devices, which are in rank order."""
        found: dict[str, list[Device]] = {}
        for device in sorted(devices, key=lambda d: d.id):
            found.setdefault(device.device_class, []).append(device)
        classes = {name: tuple(found[name]) for name in sorted(found)}
        return cls(profile, devices, classes, on_hosts((d.host, d.device_class) for d in devices))

    def only(self, on_host: OnHosts) -> Fleet:
        """So many devices of some classes on some hosts, the first by id."""
        kept: dict[str, tuple[Device, ...]] = {}
        for name, devices in self.classes.items():
            left = {host: counts[name] for host, counts in on_host.items() if counts.get(name)}
            if sum(left.values()) == len(devices):
                kept[name] = devices
            elif left:
                kept[name] = tuple(_first(devices, left))
        return Fleet(self.profile, self.everyone, kept, on_host, self._measured)

    def measured(self, modes: tuple[Mode, ...]) -> dict[str, tuple[Mode, ...]]:
        """Those of `modes` that were measured of each class, less those that another one beats."""
        if modes not in self._measured:
            self._measured[modes] = {
                c.device_class: tuple(self._worthwhile(modes, c.device_class))
                for c in self.profile.classes
            }
        return self._measured[modes]

    def _worthwhile(self, modes: tuple[Mode, ...], name: str) -> Iterator[Mode]:
        in_chunks = chunks_cost_nothing(self.profile, name)
        for mode in modes:
            beaten = in_chunks and mode.model_copy(update={"head": "chunked"}) in modes
            if can(self.profile, name, mode) and not (beaten and mode.head == "whole"):
                yield mode

    @cached_property
    def communication_dtype(self) -> ComputeDtype:
        """In which parameters are gathered between those that take part."""
        return communication_dtype(
            self.profile.of_class(name).compute_dtype for name in self.classes
        )

    @cached_property
    def size(self) -> int:
        """How many devices take part."""
        return sum(map(len, self.classes.values()))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Those that take part, in rank order."""
        if self.size == len(self.everyone):
            return self.everyone
        there = {device.id for devices in self.classes.values() for device in devices}
        return tuple(device for device in self.everyone if device.id in there)

    @cached_property
    def per_host(self) -> tuple[int, ...]:
        """How many devices each host has."""
        return tuple(sum(counts.values()) for counts in self.on_host.values())

    @cached_property
    def wire(self) -> Wire:
        return Remembered(wire_for(self.profile, self.on_host))

    @cached_property
    def whole(self) -> tuple[Pool, ...]:
        """All devices as one pool."""
        return (Pool(tuple((name, (ds,)) for name, ds in self.classes.items())),)

    @cached_property
    def by_host(self) -> tuple[Pool, ...]:
        """A pool for each host, the kinds by the names of their classes; hosts with as many devices
        of each class are alike."""
        there: dict[tuple[str, str], list[Device]] = {}
        for name, devices in self.classes.items():
            for device in devices:
                there.setdefault((device.host, name), []).append(device)
        return tuple(
            Pool(tuple((n, tuple(tuple(there[host, n]) for host in hosts)) for n, _ in kind))
            for kind, hosts in sorted(like_hosts(self.on_host).items())
        )


def _first(devices: Iterable[Device], wanted: Mapping[str, int]) -> Iterator[Device]:
    """The first so many of each host."""
    left = dict(wanted)
    for device in devices:
        if left.get(device.host, 0) > 0:
            left[device.host] -= 1
            yield device


def fewer(fleet: Fleet) -> tuple[Iterator[Fleet], bool]:
    """Fleets with some devices left out, and whether these are all that there are. None where links
    were measured, for they are known of all devices only."""
    on_host = fleet.on_host
    if fleet.profile.cluster.network is None or fleet.profile.network:
        return iter(()), True
    every = _ways(on_host) <= MOST_FLEETS
    some = _any_fewer(on_host) if every else _much_fewer(on_host)
    return (fleet.only(counts) for counts in some if counts and counts != on_host), every


def _ways(on_host: OnHosts) -> int:
    """In how many ways devices may be left out; hosts that are alike count once."""
    ways = 1
    for kind, hosts in like_hosts(on_host).items():
        of_one = prod(count + 1 for _, count in kind)
        ways *= comb(of_one + len(hosts) - 1, len(hosts))
    return ways


def _any_fewer(on_host: OnHosts) -> list[OnHosts]:
    """All ways to leave devices out, those with many devices first."""
    of_kinds = []
    for kind, hosts in like_hosts(on_host).items():
        of_one = [
            {name: n for (name, _), n in zip(kind, counts) if n}
            for counts in product(*(range(count, -1, -1) for _, count in kind))
        ]
        ways = combinations_with_replacement(of_one, len(hosts))
        of_kinds.append([dict(zip(hosts, way)) for way in ways])
    every = [{h: c for way in ways for h, c in way.items() if c} for ways in product(*of_kinds)]
    return sorted(every, key=lambda way: -sum(sum(counts.values()) for counts in way.values()))


def _much_fewer(on_host: OnHosts) -> Iterator[OnHosts]:
    """Without some classes; then 1, 2, 4, ... hosts of a kind alone, for one needs no links between
    hosts; then without half of the hosts of a kind, of few without one."""
    names = sorted({name for counts in on_host.values() for name in counts})
    for size in _sizes(names):
        for some in combinations(names, size):
            yield _of_classes(on_host, frozenset(some))
    kinds = list(like_hosts(on_host).values())
    for hosts in kinds:
        for exponent in range(len(hosts).bit_length()):
            yield {host: on_host[host] for host in hosts[: 2**exponent]}
    for hosts in kinds:
        half = len(hosts) // 2
        for gone in {1, half} if len(hosts) <= FEW_HOSTS else {half}:
            left = on_host.keys() - set(hosts[len(hosts) - gone :])
            yield {host: on_host[host] for host in on_host if host in left}


def _of_classes(on_host: OnHosts, classes: frozenset[str]) -> OnHosts:
    """The devices of these classes."""
    counts = {
        host: {name: n for name, n in of_host.items() if name in classes}
        for host, of_host in on_host.items()
    }
    return {host: of_host for host, of_host in counts.items() if of_host}


def _sizes(names: Sequence[str]) -> Iterable[int]:
    """How many classes are kept: any number of few, else all but one, and one."""
    every = range(len(names) - 1, 0, -1)
    return every if len(names) <= FEW_CLASSES else (len(names) - 1, 1)
