"""Rows of device groups, one group per pipeline stage.

Devices of one class on one host (and island, if any) are interchangeable. With few devices, all
rows are tried. With many, only rows keeping fast links inside groups: grouped by rack, host,
island or class, by class within a host, in equal parts of hosts, or by the n-th devices of all
hosts; in several orders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import permutations, product
from math import prod
from typing import NamedTuple

from gpumix.schema.cluster.cluster import Device

Group = tuple[Device, ...]
Row = tuple[Group, ...]
Counts = tuple[int, ...]
"""Number of devices of each cell."""


class DevicePlace(NamedTuple):
    """A place whose devices are interchangeable."""

    rack: str
    host: str
    island: str
    device_class: str


# By rack, host, island and class.
KEYS: tuple[Callable[[DevicePlace], object], ...] = (
    lambda cell: cell.rack,
    lambda cell: cell.host,
    lambda cell: (cell.host, cell.island),
    lambda cell: cell.device_class,
)
MOST_ROWS = 600  # up to this many, all are tried
FEW_GROUPS = 4  # up to this many, all orders are tried
MOST_GROUPS = 16


def get_device_place(device: Device) -> DevicePlace:
    """Return the place of a device."""
    return DevicePlace(device.rack, device.host, device.island, device.device_class)


def list_rows(devices: Sequence[Device], most_stages: int) -> tuple[list[Row], bool]:
    """Return rows of two or more groups using all devices, and True if no further rows exist.

    Args:
        devices: in rank order.
        most_stages: the most groups of a row.
    """
    cells: dict[DevicePlace, list[Device]] = {}
    for device in _sort_by_locality(devices):
        cells.setdefault(get_device_place(device), []).append(device)
    counts = tuple(map(len, cells.values()))
    most = min(most_stages, len(devices))
    if most < 2:
        return [], True
    every = (
        prod(count + 1 for count in counts) <= MOST_ROWS and _count_rows(counts, most) <= MOST_ROWS
    )
    found = (
        _iterate_all_rows(counts, most)
        if every
        else _list_promising_rows(list(cells), counts, most)
    )
    alike: dict[object, Row] = {}
    for counts_of_groups in found:
        if len(counts_of_groups) > 1:
            row = _take_devices(list(cells.values()), counts_of_groups)
            alike.setdefault(_make_row_key(list(cells), counts, counts_of_groups), row)
    return list(alike.values()), every


def _sort_by_locality(devices: Sequence[Device]) -> list[Device]:
    """Sort devices to make racks, hosts and islands contiguous, in order of first appearance."""
    racks = {rack: n for n, rack in enumerate(dict.fromkeys(d.rack for d in devices))}
    hosts = {host: n for n, host in enumerate(dict.fromkeys(d.host for d in devices))}
    islands = {
        place: n for n, place in enumerate(dict.fromkeys((d.host, d.island) for d in devices))
    }
    return sorted(devices, key=lambda d: (racks[d.rack], hosts[d.host], islands[d.host, d.island]))


def _make_row_key(cells: Sequence[DevicePlace], counts: Counts, row: Sequence[Counts]) -> object:
    """Return a key shared by rows differing only in the places of like hosts of a rack."""
    hosts: dict[tuple[str, str], list[tuple[str, str, int, tuple[int, ...]]]] = {}
    for place, (rack, host, island, name) in enumerate(cells):
        had = island, name, counts[place], tuple(g[place] for g in row)
        hosts.setdefault((rack, host), []).append(had)
    return tuple(sorted((rack, *had) for (rack, _), had in hosts.items()))


def _take_devices(cells: list[list[Device]], row: Sequence[Counts]) -> Row:
    """Return the devices of each group; the first groups get the low numbers of each cell."""
    taken = [0] * len(cells)
    groups = []
    for counts in row:
        group: list[Device] = []
        for place, count in enumerate(counts):
            group += cells[place][taken[place] : taken[place] + count]
            taken[place] += count
        groups.append(tuple(group))
    return tuple(groups)


@lru_cache(maxsize=4096)
def _count_rows(counts: Counts, most: int) -> int:
    """Count the rows of at most `most` groups."""
    if not any(counts):
        return 1
    if most == 0:
        return 0
    return sum(_count_rows(_subtract(counts, group), most - 1) for group in _groups(counts))


def _iterate_all_rows(counts: Counts, most: int) -> Iterator[tuple[Counts, ...]]:
    if not any(counts):
        yield ()
        return
    if most == 0:
        return
    for group in _groups(counts):
        for rest in _iterate_all_rows(_subtract(counts, group), most - 1):
            yield (group, *rest)


def _groups(counts: Counts) -> Iterator[Counts]:
    """Yield every possible non-empty group."""
    every = product(*(range(count + 1) for count in counts))
    return (group for group in every if any(group))


def _subtract(counts: Counts, group: Counts) -> Counts:
    return tuple(a - b for a, b in zip(counts, group))


def _list_promising_rows(
    cells: Sequence[DevicePlace], counts: Counts, most: int
) -> list[tuple[Counts, ...]]:
    found: dict[tuple[Counts, ...], None] = {}
    for groups in _groupings(cells, counts, min(most, MOST_GROUPS)):
        if 2 <= len(groups) <= most:
            found |= dict.fromkeys(_orders(groups))
    return list(found)


def _groupings(
    cells: Sequence[DevicePlace], counts: Counts, most: int
) -> Iterator[tuple[Counts, ...]]:
    """Yield groupings; the order of groups does not matter here."""
    places = range(len(cells))
    for key in KEYS:
        whole = _group_by(key, cells, counts)
        yield tuple(whole)
        yield from _merged(whole, most)
    hosts = _group_by(lambda cell: cell.host, cells, counts)
    each = [tuple(counts[p] if p == place else 0 for p in places) for place in places]
    yield tuple(each)
    yield from _merged(each, most)
    for parts in range(2, most + 1):
        if all(count % parts == 0 for count in counts):  # the n-th devices of all hosts
            yield (tuple(count // parts for count in counts),) * parts
        for groups in (each, hosts):
            yield tuple(part for group in groups for part in _split(group, parts))


def _group_by(
    key: Callable[[DevicePlace], object], cells: Sequence[DevicePlace], counts: Counts
) -> list[Counts]:
    """Group the devices by the value of `key`."""
    return [
        tuple(count if key(cell) == name else 0 for cell, count in zip(cells, counts))
        for name in dict.fromkeys(map(key, cells))
    ]


def _merged(groups: Sequence[Counts], most: int) -> Iterator[tuple[Counts, ...]]:
    """Merge runs of neighboring groups into fewer groups of about equal size."""
    total = sum(map(sum, groups))
    for wanted in range(2, min(most, len(groups) - 1) + 1):
        merged: list[Counts] = [tuple(0 for _ in groups[0])] * wanted
        done = 0
        for group in groups:
            place = min(wanted - 1, done * wanted // total)
            merged[place] = tuple(a + b for a, b in zip(merged[place], group))
            done += sum(group)
        if all(map(any, merged)):
            yield tuple(merged)


def _split(group: Counts, parts: int) -> list[Counts]:
    """Split a group into `parts` equal runs of devices; keep the group if its size is not
    divisible."""
    size = sum(group)
    if size % parts:
        return [group]
    left, found = list(group), []
    for _ in range(parts):
        part, wanted = [0] * len(left), size // parts
        for place, count in enumerate(left):
            part[place] = min(count, wanted)
            left[place] -= part[place]
            wanted -= part[place]
        found.append(tuple(part))
    return found


def _orders(groups: tuple[Counts, ...]) -> Iterator[tuple[Counts, ...]]:
    """Yield all orders of few groups; of many, some orders and their reverse."""
    if len(groups) <= FEW_GROUPS:
        yield from dict.fromkeys(permutations(groups))
        return
    for order in (groups, tuple(sorted(groups, key=lambda group: -sum(group)))):
        yield order
        yield order[::-1]
    if len(Counter(groups)) <= FEW_GROUPS:
        for kinds in permutations(dict.fromkeys(groups)):
            yield tuple(sorted(groups, key=kinds.index))
