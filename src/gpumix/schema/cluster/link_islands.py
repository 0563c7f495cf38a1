"""Islands of devices on a host, and racks of hosts: links are clearly faster inside than between.

Islands and racks are stated in the cluster, or found from pairwise message times. Devices of one
class in one island of a host are interchangeable, and so are links between two such places: the
link with the median time stands for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Literal

from pydantic import Field

from gpumix.schema.cluster.cluster import Device
from gpumix.schema.curve import Curve
from gpumix.schema.value import Value

TIMES_FASTER = 1.5  # every link inside an island or a rack relative to every link leaving it
# Largest number of devices of a host, and of hosts, timed in pairs.
MOST_DEVICES, MOST_HOSTS = 16, 16

Near = Literal["island", "inside", "rack", "all"]
"""The smallest place containing some devices: an island, a host, a rack, or the cluster."""

Place = tuple[str, ...]
"""A group of devices with interchangeable links: (host, class, island), or (rack,) across hosts."""

Seconds = Mapping[tuple[str, str], float]


class PairTimes(Value):
    """Seconds of a message between two devices of a host, or between two hosts, by message bytes.
    The devices are given by index in the cluster's rank order."""

    one: int = Field(ge=0)
    other: int = Field(ge=0)
    times: Curve


class LinkTimes(Value):
    """Seconds of a message between devices of two places, by message bytes."""

    one: Place
    other: Place
    times: Curve


class Links(Value):
    """Matrix of links between all pairs of places on a host, and of racks ("" contains all hosts
    without a rack). Empty if not measured."""

    rows: tuple[LinkTimes, ...] = ()

    @cached_property
    def _times(self) -> dict[tuple[Place, Place], Curve]:
        return {(row.one, row.other): row.times for row in self.rows}

    def times(self, one: Device, other: Device) -> Curve | None:
        """Return the times of a message between two devices, or None if unknown."""
        return self._times.get(get_link_ends(one, other))

    @classmethod
    def of(cls, devices: Sequence[Device], pairs: Iterable[PairTimes]) -> Links:
        """Build the links from times of pairs of `devices`, the cluster's devices in rank order."""
        found: dict[tuple[Place, Place], list[Curve]] = {}
        for pair in pairs:
            places = get_link_ends(devices[pair.one], devices[pair.other])
            found.setdefault(places, []).append(pair.times)
        return cls(
            rows=tuple(
                LinkTimes(one=one, other=other, times=_pick_median_curve(curves))
                for (one, other), curves in sorted(found.items())
            )
        )


def get_link_ends(one: Device, other: Device) -> tuple[Place, Place]:
    """Return the places of two devices, independent of the argument order."""
    if one.host != other.host:
        here, there = sorted([one.rack, other.rack])
        return (here,), (there,)
    first, second = sorted((d.host, d.device_class, d.island) for d in (one, other))
    return first, second


def find_smallest_place(devices: Sequence[Device]) -> Near:
    """Return the smallest place containing all devices."""
    first = devices[0]
    if all(device.host == first.host for device in devices):
        alike = first.island and all(device.island == first.island for device in devices)
        return "island" if alike else "inside"
    alike = first.rack and all(device.rack == first.rack for device in devices)
    return "rack" if alike else "all"


def count_largest_island(devices: Iterable[Device], what: Literal["island", "rack"]) -> int:
    """Return the number of devices in the largest island or rack, 0 if there is none."""
    names = [(d.host, d.island) if what == "island" else ("", d.rack) for d in devices]
    return max(Counter(name for name in names if name[1]).values(), default=0)


def add_found_islands(devices: Sequence[Device], pairs: Iterable[PairTimes]) -> tuple[Device, ...]:
    """Add the islands and racks found from link times to the cluster's devices, given in rank
    order. Stated islands and racks are kept."""
    inside: dict[tuple[str, str], float] = {}
    across: dict[tuple[str, str], float] = {}
    for pair in pairs:
        one, other = devices[pair.one], devices[pair.other]
        if one.host == other.host:
            inside[one.id, other.id] = pair.times.values[-1]
        else:
            across[one.host, other.host] = pair.times.values[-1]
    islands: dict[str, str] = {}
    racks: dict[str, str] = {}
    if not any(device.island for device in devices):
        islands = _find_islands(devices, inside)
    if not any(device.rack for device in devices):
        hosts = list(dict.fromkeys(device.host for device in devices))
        for number, rack in enumerate(group_by_link_speed(hosts, across)):
            racks |= dict.fromkeys(rack, str(number))
    return tuple(
        device.model_copy(
            update={
                "island": islands.get(device.id, device.island),
                "rack": racks.get(device.host, device.rack),
            }
        )
        for device in devices
    )


def _find_islands(devices: Sequence[Device], seconds: Seconds) -> dict[str, str]:
    """Return the island of each device that is in an island; islands are numbered from 0 per
    host."""
    alike: dict[tuple[str, str], list[str]] = {}
    for device in devices:
        alike.setdefault((device.host, device.device_class), []).append(device.id)
    numbers: Counter[str] = Counter()
    found: dict[str, str] = {}
    for (host, _), names in alike.items():
        for island in group_by_link_speed(names, seconds):
            found |= dict.fromkeys(island, str(numbers[host]))
            numbers[host] += 1
    return found


def group_by_link_speed(names: Sequence[str], seconds: Seconds) -> list[tuple[str, ...]]:
    """Group names by links: every link inside a group is clearly faster than every link leaving it.

    Of all groupings the clearest is returned, as groups of two or more. The list is empty if all
    links are alike or a link is unknown.

    Args:
        seconds: duration of a message between each pair of names, in either order.
    """
    known = {}
    for one, other in combinations(names, 2):
        found = seconds.get((one, other), seconds.get((other, one)))
        if found is None:
            return []
        known[one, other] = found
    best, clearest = [], TIMES_FASTER
    for group_of in _merge_by_fastest_link(names, known):
        inside = [s for (one, other), s in known.items() if group_of[one] == group_of[other]]
        outside = [s for (one, other), s in known.items() if group_of[one] != group_of[other]]
        if outside and min(outside) >= clearest * max(inside):
            numbers, clearest = dict.fromkeys(group_of.values()), min(outside) / max(inside)
            best = [tuple(name for name in names if group_of[name] == n) for n in numbers]
    return [group for group in best if len(group) > 1]


def _merge_by_fastest_link(names: Sequence[str], known: Seconds) -> Iterator[dict[str, int]]:
    """Yield the group number of each name while joining groups by link, fastest first, until only
    one group is left."""
    group_of = {name: number for number, name in enumerate(names)}
    for one, other in sorted(known, key=lambda pair: known[pair]):
        here, there = group_of[one], group_of[other]
        if here != there:
            group_of = {name: here if g == there else g for name, g in group_of.items()}
            yield group_of


def _pick_median_curve(curves: Sequence[Curve]) -> Curve:
    """Return the curve with the median time of the largest message."""
    return sorted(curves, key=lambda curve: curve.values[-1])[len(curves) // 2]
