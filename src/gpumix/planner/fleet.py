"""The devices that a plan may use: counted by class and host, so that leaving some out is cheap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, combinations_with_replacement, product
from math import comb, prod

from gpumix.cost.time import can
from gpumix.cost.wire import OnHosts, Remembered, Wire, on_hosts, wire_for
from gpumix.spec.cluster import Device
from gpumix.spec.plan import Mode
from gpumix.spec.profile import Profile

FEW_CLASSES = 4  # of which all subsets are tried
FEW_HOSTS = 8  # of which some may be left out
MOST_FLEETS = 64  # of all ways to leave some out


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
        there = {host: counts for host, counts in on_host.items() if counts}
        return Fleet(self.profile, self.everyone, kept, there, self._measured)

    def measured(self, modes: tuple[Mode, ...]) -> dict[str, tuple[Mode, ...]]:
        """Those of `modes` that were measured of each class."""
        if modes not in self._measured:
            self._measured[modes] = {
                c.device_class: tuple(m for m in modes if can(self.profile, c.device_class, m))
                for c in self.profile.classes
            }
        return self._measured[modes]

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
        on_host: dict[str, dict[str, list[Device]]] = {host: {} for host in sorted(self.on_host)}
        for name, devices in self.classes.items():
            for device in devices:
                on_host[device.host].setdefault(name, []).append(device)
        kinds: dict[tuple[tuple[str, int], ...], list[dict[str, list[Device]]]] = {}
        for classes in on_host.values():
            kinds.setdefault(tuple((n, len(ds)) for n, ds in classes.items()), []).append(classes)
        return tuple(
            Pool(tuple((name, tuple(tuple(host[name]) for host in hosts)) for name, _ in kind))
            for kind, hosts in sorted(kinds.items())
        )


def _first(devices: Iterable[Device], wanted: Mapping[str, int]) -> Iterator[Device]:
    """The first so many of each host."""
    left = dict(wanted)
    for device in devices:
        if left.get(device.host, 0) > 0:
            left[device.host] -= 1
            yield device


def fleets(profile: Profile, devices: tuple[Device, ...]) -> Iterator[Fleet]:
    """All devices; where links are stated, and so are known for any devices, also fewer: all ways
    if there are not too many, else without classes and hosts."""
    everything = Fleet.of(profile, devices)
    yield everything
    if profile.cluster.network is None or profile.network:
        return
    every = everything.on_host
    fewer = _any_fewer(every) if _ways(every) <= MOST_FLEETS else _without_classes_and_hosts(every)
    seen = {_key(every)}
    for some in fewer:
        on_host = {host: some[host] for host in every if some.get(host)}
        if on_host and _key(on_host) not in seen:
            seen.add(_key(on_host))
            yield everything.only(on_host)
            if len(seen) > MOST_FLEETS:
                return


def _key(on_host: OnHosts) -> frozenset[tuple[str, tuple[tuple[str, int], ...]]]:
    return frozenset((host, tuple(sorted(counts.items()))) for host, counts in on_host.items())


def _alike(on_host: OnHosts) -> dict[tuple[tuple[str, int], ...], list[str]]:
    """Hosts by the devices that they have."""
    kinds: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for host in sorted(on_host):
        kinds.setdefault(tuple(sorted(on_host[host].items())), []).append(host)
    return kinds


def _ways(on_host: OnHosts) -> int:
    """In how many ways devices may be left out; hosts that are alike count once."""
    ways = 1
    for kind, hosts in _alike(on_host).items():
        of_one = prod(count + 1 for _, count in kind)
        ways *= comb(of_one + len(hosts) - 1, len(hosts))
    return ways


def _any_fewer(on_host: OnHosts) -> list[OnHosts]:
    """All ways to leave devices out, those with many devices first."""
    of_kinds = []
    for kind, hosts in _alike(on_host).items():
        of_one = [
            {name: n for (name, _), n in zip(kind, counts) if n}
            for counts in product(*(range(count, -1, -1) for _, count in kind))
        ]
        ways = combinations_with_replacement(of_one, len(hosts))
        of_kinds.append([dict(zip(hosts, way)) for way in ways])
    every = [{h: c for way in ways for h, c in way.items()} for ways in product(*of_kinds)]
    return sorted(every, key=lambda way: -sum(sum(counts.values()) for counts in way.values()))


def _without_classes_and_hosts(on_host: OnHosts) -> Iterator[OnHosts]:
    """Without some classes; then without some hosts too, few hosts first: one alone needs no links
    between hosts."""
    names = sorted({name for counts in on_host.values() for name in counts})
    kept_classes = [frozenset(some) for size in _sizes(names) for some in combinations(names, size)]
    kept_hosts = [frozenset(on_host)]
    if len(on_host) <= FEW_HOSTS:
        fewer = _fewer_hosts(on_host)
        kept_hosts += sorted(fewer, key=lambda some: (len(some), sorted(some)))
    for hosts, classes in product(kept_hosts, kept_classes):
        yield {
            host: {name: n for name, n in counts.items() if name in classes}
            for host, counts in on_host.items()
            if host in hosts
        }


def _sizes(names: Sequence[str]) -> Iterable[int]:
    """How many classes are kept: any number of few, else all, all but one, and one."""
    every = range(len(names), 0, -1)
    return every if len(names) <= FEW_CLASSES else (len(names), len(names) - 1, 1)


def _fewer_hosts(on_host: OnHosts) -> Iterator[frozenset[str]]:
    """Some of the hosts; of those that are alike the first ones."""
    kinds = _alike(on_host)
    for counts in product(*(range(len(hosts) + 1) for hosts in kinds.values())):
        if 0 < sum(counts) < len(on_host):
            yield frozenset(h for n, hosts in zip(counts, kinds.values()) for h in hosts[:n])
