"""The devices of a plan, counted by class and host, so that leaving some out is cheap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import combinations, combinations_with_replacement, product
from math import comb, prod

from gpumix.cost.network.collective_times import (
    CollectiveSeconds,
    ShardedLayout,
    compute_collective_seconds,
)
from gpumix.cost.network.link_times import (
    CachedLinkModel,
    LinkModel,
    OnHosts,
    build_link_model,
    count_devices_by_host,
    group_equal_hosts,
)
from gpumix.cost.step_time import can_predict_mode, is_chunked_cross_entropy_free
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.dtypes import choose_communication_dtype
from gpumix.schema.plan.stage import ComputeDtype, Mode
from gpumix.schema.profile.profile import Profile

FEW_CLASSES = 4  # up to this many, all subsets are tried
FEW_HOSTS = 8  # of a kind: up to this many, a single host may matter
MOST_FLEETS = 64  # ways to leave devices out: up to this many, all are tried


@dataclass(frozen=True)
class Pool:
    """Devices dividing one copy of the state, together with all like pools.

    `classes` has the devices of each class by id, one tuple for each of the like pools.
    """

    classes: tuple[tuple[str, tuple[tuple[Device, ...], ...]], ...]

    @property
    def alike(self) -> int:
        """The number of like pools."""
        return len(self.classes[0][1])

    @property
    def size(self) -> int:
        """The number of devices in each pool."""
        return sum(len(devices[0]) for _, devices in self.classes)


@dataclass(frozen=True)
class Fleet:
    """Chosen devices of a profile, and links between them, shared by all settings of a search.

    `all_devices` has all devices in rank order. `classes` has the devices taking part by id, the
    classes by name; `on_host` counts them. A step has `waves` waves: all seconds of the fleet are
    those of a wave on average.
    """

    profile: Profile
    all_devices: tuple[Device, ...]
    classes: Mapping[str, tuple[Device, ...]]
    on_host: OnHosts
    waves: float = 1.0
    _measured: dict[tuple[Mode, ...], dict[str, tuple[Mode, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, profile: Profile, devices: tuple[Device, ...], waves: float = 1.0) -> Fleet:
        """Build a fleet of all `devices`, given in rank order."""
        found: dict[str, list[Device]] = {}
        for device in sorted(devices, key=lambda d: d.id):
            found.setdefault(device.device_class, []).append(device)
        classes = {name: tuple(found[name]) for name in sorted(found)}
        return cls(
            profile,
            devices,
            classes,
            count_devices_by_host((d.host, d.device_class) for d in devices),
            waves,
        )

    def only(self, on_host: OnHosts) -> Fleet:
        """Keep as many devices of each class on each host as `on_host` says, the first by id."""
        kept: dict[str, tuple[Device, ...]] = {}
        of_class: dict[str, dict[str, int]] = {name: {} for name in self.classes}
        for host, counts in on_host.items():
            for name, count in counts.items():
                of_class[name][host] = count
        for name, devices in self.classes.items():
            left = of_class[name]
            if sum(left.values()) == len(devices):
                kept[name] = devices
            elif left:
                kept[name] = tuple(_first(devices, left))
        return Fleet(self.profile, self.all_devices, kept, on_host, self.waves, self._measured)

    def measured(self, modes: tuple[Mode, ...]) -> dict[str, tuple[Mode, ...]]:
        """Return the measured `modes` of each class, without modes beaten by another."""
        if modes not in self._measured:
            self._measured[modes] = {
                c.device_class: tuple(self._worthwhile(modes, c.device_class))
                for c in self.profile.classes
            }
        return self._measured[modes]

    def _worthwhile(self, modes: tuple[Mode, ...], name: str) -> Iterator[Mode]:
        in_chunks = is_chunked_cross_entropy_free(self.profile, name)
        for mode in modes:
            beaten = in_chunks and mode.model_copy(update={"head": "chunked"}) in modes
            if can_predict_mode(self.profile, name, mode) and not (beaten and mode.head == "whole"):
                yield mode

    @cached_property
    def communication_dtype(self) -> ComputeDtype:
        """The dtype for gathering parameters between devices taking part."""
        return choose_communication_dtype(
            self.profile.of_class(name).compute_dtype for name in self.classes
        )

    @cached_property
    def size(self) -> int:
        """The number of devices taking part."""
        return sum(map(len, self.classes.values()))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices taking part, in rank order."""
        if self.size == len(self.all_devices):
            return self.all_devices
        there = {device.id for devices in self.classes.values() for device in devices}
        return tuple(device for device in self.all_devices if device.id in there)

    @cached_property
    def per_host(self) -> tuple[int, ...]:
        """The number of devices on each host."""
        return tuple(sum(counts.values()) for counts in self.on_host.values())

    @cached_property
    def link_model(self) -> LinkModel:
        return CachedLinkModel(build_link_model(self.profile, self.on_host))

    @cached_property
    def compute_seconds(self) -> Callable[[ShardedLayout], CollectiveSeconds]:
        """Seconds of a layout's collectives, computed once."""

        def compute(layout: ShardedLayout) -> CollectiveSeconds:
            links = compute_collective_seconds(self.profile, self.link_model, layout)
            return links.averaged_over(self.waves, gathers_once=layout.zero_stage < 3)

        return cache(compute)

    @property
    def has_stated_links(self) -> bool:
        """True if fewer devices may be linked better: measured links are of all devices only."""
        return self.profile.cluster.network is not None and not self.profile.network

    @cached_property
    def whole(self) -> tuple[Pool, ...]:
        """All devices as one pool."""
        return (Pool(tuple((name, (ds,)) for name, ds in self.classes.items())),)

    @cached_property
    def by_host(self) -> tuple[Pool, ...]:
        """A pool for each host, the kinds sorted by class names; hosts with equally many devices of
        each class are alike."""
        there: dict[tuple[str, str], list[Device]] = {}
        for name, devices in self.classes.items():
            for device in devices:
                there.setdefault((device.host, name), []).append(device)
        return tuple(
            Pool(tuple((n, tuple(tuple(there[host, n]) for host in hosts)) for n, _ in kind))
            for kind, hosts in sorted(group_equal_hosts(self.on_host).items())
        )


def _first(devices: Iterable[Device], wanted: Mapping[str, int]) -> Iterator[Device]:
    """Yield the first devices of each host, as many as wanted."""
    left = dict(wanted)
    for device in devices:
        if left.get(device.host, 0) > 0:
            left[device.host] -= 1
            yield device


def iterate_smaller_fleets(fleet: Fleet) -> tuple[Iterator[Fleet], bool]:
    """Return fleets with some devices left out, and True if no further fleets exist."""
    on_host = fleet.on_host
    if not fleet.has_stated_links:
        return iter(()), True
    every = _count_subsets(on_host) <= MOST_FLEETS
    some = _list_all_subsets(on_host) if every else _iterate_coarse_subsets(on_host)
    return (fleet.only(counts) for counts in some if counts and counts != on_host), every


def _count_subsets(on_host: OnHosts) -> int:
    """Count the ways to leave devices out; like hosts count once."""
    ways = 1
    for kind, hosts in group_equal_hosts(on_host).items():
        of_one = prod(count + 1 for _, count in kind)
        ways *= comb(of_one + len(hosts) - 1, len(hosts))
    return ways


def _list_all_subsets(on_host: OnHosts) -> list[OnHosts]:
    """Return all ways to leave devices out, the largest fleets first."""
    of_kinds = []
    for kind, hosts in group_equal_hosts(on_host).items():
        of_one = [
            {name: n for (name, _), n in zip(kind, counts) if n}
            for counts in product(*(range(count, -1, -1) for _, count in kind))
        ]
        ways = combinations_with_replacement(of_one, len(hosts))
        of_kinds.append([dict(zip(hosts, way)) for way in ways])
    every = [{h: c for way in ways for h, c in way.items() if c} for ways in product(*of_kinds)]
    return sorted(every, key=lambda way: -sum(sum(counts.values()) for counts in way.values()))


def _iterate_coarse_subsets(on_host: OnHosts) -> Iterator[OnHosts]:
    """Yield fleets without some classes; then 1, 2, 4, ... hosts of a kind alone (a single host
    needs no links between hosts); then without half the hosts of a kind, or 1 of few."""
    names = sorted({name for counts in on_host.values() for name in counts})
    for size in _sizes(names):
        for some in combinations(names, size):
            yield select_classes(on_host, frozenset(some))
    kinds = list(group_equal_hosts(on_host).values())
    for hosts in kinds:
        for exponent in range(len(hosts).bit_length()):
            yield {host: on_host[host] for host in hosts[: 2**exponent]}
    for hosts in kinds:
        half = len(hosts) // 2
        for gone in {1, half} if len(hosts) <= FEW_HOSTS else {half}:
            left = on_host.keys() - set(hosts[len(hosts) - gone :])
            yield {host: on_host[host] for host in on_host if host in left}


def select_classes(on_host: OnHosts, classes: frozenset[str]) -> OnHosts:
    """Keep only the devices of `classes`."""
    counts = {
        host: {name: n for name, n in of_host.items() if name in classes}
        for host, of_host in on_host.items()
    }
    return {host: of_host for host, of_host in counts.items() if of_host}


def _sizes(names: Sequence[str]) -> Iterable[int]:
    """Return the numbers of classes to keep: any number of few classes, else all but 1, and 1."""
    every = range(len(names) - 1, 0, -1)
    return every if len(names) <= FEW_CLASSES else (len(names) - 1, 1)
