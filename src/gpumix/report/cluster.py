"""A cluster as nested boxes (racks, hosts, islands) with the links inside each box, and devices
with their part of the plan.

Rates are for one large message, on the links used by the cost model: as measured, or as stated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Literal

from gpumix.cost.network.link_times import Messages
from gpumix.report.ranges import Range
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.cluster.link_islands import find_smallest_place
from gpumix.schema.cluster.network import Link, Where
from gpumix.schema.curve import Curve
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import Profile

MOST_ALONE = 24  # devices listed one by one; beyond, a host's devices of a class are grouped

Level = Literal["cluster", "rack", "host", "island"]
Source = Literal["measured", "stated"]


@dataclass(frozen=True)
class PlanPart:
    """A device's part of the plan, averaged over stages numbered from 1.

    `samples` counts samples of the device, or of its tensor-parallel group. `computed` is the
    device's fraction of the samples of a step. `stored` is its fraction of the state sharded over
    the stage's workers, None if each worker stores all. The even values are the fractions in an
    even split.
    """

    stages: tuple[int, ...]
    samples: int
    computed: float
    even_computed: float
    stored: float | None
    even_stored: float | None
    tensor_parallel: int


@dataclass(frozen=True)
class BoxMember:
    """A device, or `count` devices of one class in a box, represented by `device`. `part` contains
    their means, `samples` their range; a None `part` means left out of the plan."""

    device: str
    device_class: str
    count: int
    part: PlanPart | None
    samples: Range


@dataclass(frozen=True)
class Rate:
    """Range of the link rates inside a box; `name` is the stated link's name, if common to all
    links; `source` is "measured" or "stated"."""

    bytes_per_s: Range
    source: str
    name: str = ""


@dataclass(frozen=True)
class Box:
    """A box: inner boxes, devices outside of inner boxes, and the link between all members. `alike`
    lists further hosts, equal to the box."""

    level: Level
    name: str
    link: Rate | None
    boxes: tuple[Box, ...] = ()
    members: tuple[BoxMember, ...] = ()
    alike: tuple[str, ...] = ()

    @property
    def all_members(self) -> tuple[BoxMember, ...]:
        """All members, including members of inner boxes."""
        return (*self.members, *(m for box in self.boxes for m in box.all_members))

    @property
    def devices(self) -> int:
        """Number of devices, including devices of hosts in `alike`."""
        own = sum(member.count for member in self.members)
        return (own + sum(box.devices for box in self.boxes)) * (1 + len(self.alike))

    @property
    def hosts(self) -> int:
        """Number of hosts, including hosts in `alike`."""
        if self.level == "host":
            return 1 + len(self.alike)
        return sum(box.hosts for box in self.boxes)


def build_cluster_box(plan: Plan, profile: Profile | None) -> Box:
    """Build the box of all devices; without a profile, of the plan's devices without links."""
    devices = _devices(plan, profile)
    return _BoxBuilder(plan, profile, fold=len(devices) > MOST_ALONE).all_of(devices)


def _devices(plan: Plan, profile: Profile | None) -> list[Device]:
    """Return all devices with the classes used in the plan, sorted by class."""
    workers = {worker.device: worker for stage in plan.stages for worker in stage.workers}
    there = {} if profile is None else {d.id: d for d in profile.cluster.in_rank_order()}
    strangers = [_device(worker) for name, worker in workers.items() if name not in there]
    known = [
        device.model_copy(update={"device_class": workers[name].device_class})
        if name in workers
        else device
        for name, device in there.items()
    ]
    classes = list(dict.fromkeys(device.device_class for device in (*known, *strangers)))
    return sorted([*known, *strangers], key=lambda device: classes.index(device.device_class))


def _device(worker: Worker) -> Device:
    return Device(id=worker.device, device_class=worker.device_class, host=worker.host)


class _BoxBuilder:
    """A builder of a cluster's boxes."""

    def __init__(self, plan: Plan, profile: Profile | None, *, fold: bool) -> None:
        self._profile = profile
        self._messages = None if profile is None else Messages(profile)
        self._classes = {} if profile is None else {d.id: d for d in profile.cluster.devices}
        self._parts = dict(_parts(plan))
        self._fold = fold

    def all_of(self, devices: Sequence[Device]) -> Box:
        racks = _by(devices, "rack")
        if len(racks) == 1:
            return self._hosts("cluster", "", devices)
        loose = _by(racks.pop("", []), "host")
        boxes = [self._hosts("rack", name, own) for name, own in racks.items()]
        hosts = self._folded([self._host(name, own) for name, own in loose.items()])
        link = self._rate(_get_pairs_across([*racks.values(), *_pick_unlike_hosts(loose.values())]))
        return Box("cluster", "", link, (*boxes, *hosts))

    def _hosts(self, level: Level, name: str, devices: Sequence[Device]) -> Box:
        hosts = _by(devices, "host")
        boxes = self._folded([self._host(host, own) for host, own in hosts.items()])
        return Box(
            level,
            name,
            self._rate(_get_pairs_across(_pick_unlike_hosts(hosts.values()))),
            tuple(boxes),
        )

    def _host(self, name: str, devices: Sequence[Device]) -> Box:
        islands = _by(devices, "island")
        if len(islands) == 1:
            return Box(
                "host", name, self._rate(_get_pairs_inside(devices)), (), self._members(devices)
            )
        boxes = tuple(
            Box("island", island, self._rate(_get_pairs_inside(own)), (), self._members(own))
            for island, own in islands.items()
            if island
        )
        alone = islands.get("", [])
        link = self._rate(
            _get_pairs_across([*(own for island, own in islands.items() if island), *_each(alone)])
        )
        return Box("host", name, link, boxes, self._members(alone))

    def _members(self, devices: Sequence[Device]) -> tuple[BoxMember, ...]:
        alike: dict[object, list[Device]] = {}
        for device in devices:
            part = self._parts.get(device.id)
            kind = (device.device_class, part and part.stages) if self._fold else device.id
            alike.setdefault(kind, []).append(device)
        return tuple(self._member(own) for own in alike.values())

    def _member(self, devices: Sequence[Device]) -> BoxMember:
        parts = [part for d in devices if (part := self._parts.get(d.id)) is not None]
        first = devices[0]
        samples = Range.of([part.samples for part in parts] or [0])
        return BoxMember(first.id, first.device_class, len(devices), _mean(parts), samples)

    def _folded(self, hosts: Sequence[Box]) -> list[Box]:
        """Merge equal hosts in large clusters."""
        if not self._fold:
            return list(hosts)
        alike: dict[object, list[Box]] = {}
        for host in hosts:
            alike.setdefault(_get_layout_key(host), []).append(host)
        return [_merge_boxes(own) for own in alike.values()]

    def _rate(self, pairs: Iterable[tuple[Device, Device]]) -> Rate | None:
        """Return the rates of the known links between device pairs; None without a known link."""
        found = [link for pair in pairs if (link := self._link(*pair)) is not None]
        rates = [rate for _, _, rate in found]
        if not rates:
            return None
        source = " or ".join(sorted({source for source, _, _ in found}))
        names = {name for _, name, _ in found}
        return Rate(Range.of(rates), source, names.pop() if len(names) == 1 else "")

    def _link(self, one: Device, other: Device) -> tuple[Source, str, float] | None:
        if self._profile is None or self._messages is None:
            return None
        one, other = (self._classes.get(device.id, device) for device in (one, other))
        timed = self._messages.timed(one, other)
        if timed is not None:
            rate = _rate_of(timed)
            return None if rate is None else ("measured", "", rate)
        link = _stated(self._profile, one, other)
        return None if link is None else ("stated", link.name, link.largest_bytes_per_s)


def _stated(profile: Profile, one: Device, other: Device) -> Link | None:
    network, nearest = profile.cluster.network, find_smallest_place((one, other))
    where: Where = "between" if nearest == "all" else nearest
    return None if network is None else network.of(where, one.device_class, other.device_class)


def _rate_of(times: Curve) -> float | None:
    """Return the rate of the largest message measured."""
    return times.sizes[-1] / times.values[-1] if times.values[-1] > 0 else None


def _by(
    devices: Iterable[Device], what: Literal["rack", "host", "island"]
) -> dict[str, list[Device]]:
    found: dict[str, list[Device]] = {}
    for device in devices:
        found.setdefault(getattr(device, what), []).append(device)
    return found


def _each(devices: Iterable[Device]) -> Iterator[list[Device]]:
    return ([device] for device in devices)


def _pick_unlike_hosts(hosts: Iterable[Sequence[Device]]) -> list[Sequence[Device]]:
    """Return at most two hosts of each combination of classes, which covers all kinds of links."""
    alike: dict[object, list[Sequence[Device]]] = {}
    for devices in hosts:
        alike.setdefault(frozenset(d.device_class for d in devices), []).append(devices)
    return [own for same in alike.values() for own in same[:2]]


def _get_pairs_across(groups: Sequence[Sequence[Device]]) -> Iterator[tuple[Device, Device]]:
    """Yield one device pair for each pair of classes of each pair of groups."""
    for one, other in combinations(groups, 2):
        for first in _of_each_class(one):
            for second in _of_each_class(other):
                yield first, second


def _of_each_class(devices: Sequence[Device]) -> Iterable[Device]:
    return {device.device_class: device for device in reversed(devices)}.values()


def _get_pairs_inside(devices: Sequence[Device]) -> Iterator[tuple[Device, Device]]:
    """Return device pairs covering all kinds of links: two devices of each class."""
    alike: dict[str, list[Device]] = {}
    for device in devices:
        alike.setdefault(device.device_class, []).append(device)
    return combinations([device for own in alike.values() for device in own[:2]], 2)


def _parts(plan: Plan) -> Iterator[tuple[str, PlanPart]]:
    """Yield the part of the plan of each device."""
    found: dict[str, list[PlanPart]] = {}
    for number, stage in enumerate(plan.stages, 1):
        for worker in stage.workers:
            found.setdefault(worker.device, []).append(_part(plan, stage, worker, number))
    for device, parts in found.items():
        whole = _mean(parts)
        assert whole is not None
        stages = tuple(stage for part in parts for stage in part.stages)
        yield device, replace(whole, stages=stages)


def _part(plan: Plan, stage: Stage, worker: Worker, number: int) -> PlanPart:
    # With state replicated per host, shards are divided within a host.
    divide = sum(plan.sharding == "all" or w.host == worker.host for w in stage.workers)
    return PlanPart(
        stages=(number,) if len(plan.stages) > 1 else (),
        samples=worker.samples,
        # Workers of a tensor-parallel group split the group's samples.
        computed=worker.samples / stage.get_tp_size(worker) / plan.global_batch,
        even_computed=1 / len(stage.workers),
        stored=stage.stored_by(worker) if plan.zero_stage else None,
        even_stored=1 / divide if plan.zero_stage else None,
        tensor_parallel=stage.get_tp_size(worker),
    )


def _mean(parts: Sequence[PlanPart]) -> PlanPart | None:
    if not parts:
        return None
    stored = [part.stored for part in parts if part.stored is not None]
    even = [part.even_stored for part in parts if part.even_stored is not None]
    return replace(
        parts[0],
        computed=fmean(part.computed for part in parts),
        even_computed=fmean(part.even_computed for part in parts),
        stored=fmean(stored) if stored else None,
        even_stored=fmean(even) if even else None,
    )


def _get_layout_key(host: Box) -> object:
    """Return the key shared by hosts with an equal layout."""
    boxes = tuple(_get_layout_key(box) for box in host.boxes)
    members = ((m.device_class, m.count, m.part and m.part.stages) for m in host.members)
    return host.level, boxes, tuple(members)


def _merge_boxes(hosts: Sequence[Box]) -> Box:
    """Merge equal boxes into the first box, with means over all boxes."""
    first, *others = hosts
    members = tuple(
        replace(
            same[0],
            part=_mean([m.part for m in same if m.part is not None]),
            samples=Range(min(m.samples.least for m in same), max(m.samples.most for m in same)),
        )
        for same in zip(*(host.members for host in hosts), strict=True)
    )
    boxes = tuple(_merge_boxes(same) for same in zip(*(host.boxes for host in hosts), strict=True))
    link = _joined([host.link for host in hosts if host.link is not None])
    alike = tuple(host.name for host in others) if first.level == "host" else ()
    return replace(first, members=members, boxes=boxes, link=link, alike=alike)


def _joined(rates: Sequence[Rate]) -> Rate | None:
    if not rates:
        return None
    ranges = [rate.bytes_per_s for rate in rates]
    whole = Range(min(r.least for r in ranges), max(r.most for r in ranges))
    return replace(rates[0], bytes_per_s=whole)
