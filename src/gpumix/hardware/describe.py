"""A cluster in one line, such as "4x rtx3090, 2x p40": cards of the catalogue, before any is there.

Commas join cards of one host, semicolons separate hosts, and "3 hosts of 8x a100-80gb-sxm" repeats
one. Hosts need a link that is stated; inside a host the cards' own links serve.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement

from gpumix.hardware.catalogue import Card, CoherentLink, DeviceLinkKind, PcieLink, find
from gpumix.hardware.roofline import flops_per_s
from gpumix.spec.cluster import Cluster, Device, DeviceClass
from gpumix.spec.dtypes import Precision, compute_dtypes
from gpumix.spec.errors import InputError
from gpumix.spec.network import Link, LinkOf, Network, link
from gpumix.spec.placed import placed
from gpumix.spec.stage import ComputeDtype

_HOSTS = re.compile(r"^(\d+)\s+hosts?\s+of\s+(.+)$")
_CARDS = re.compile(r"^(?:(\d{1,12})\s*[xX×*]\s*)?([A-Za-z0-9].*)$")
MOST_DEVICES = 200_000

# NVLink and Infinity Fabric that every card of a host shares; a bridge joins two of them only.
_FABRICS = (DeviceLinkKind.NVLINK, DeviceLinkKind.INFINITY_FABRIC)
FABRIC_PART, PCIE_PART, LATENCY_S = 0.8, 0.75, 8e-6


@dataclass(frozen=True)
class Cards:
    """So many cards of one kind."""

    count: int
    card: Card


def cards(text: str) -> Cards:
    """What "4x rtx3090" or "p40" means.

    Raises:
        InputError: it is no count and card, or the catalogue does not know the card.
    """
    count, name = counted(text)
    return Cards(count or 1, find(name))


def counted(text: str) -> tuple[int | None, str]:
    """The number in "4x rtx3090", None if there is none, and the rest.

    Raises:
        InputError: it is no number of anything, or of nothing.
    """
    found = _CARDS.match(text.strip())
    if found is None or (found[1] and int(found[1]) == 0):
        raise InputError(
            f"'{text.strip()}' is not a number of cards", fix="write them as '4x rtx3090'"
        )
    return (int(found[1]) if found[1] else None), found[2]


def cluster(
    text: str,
    precision: Precision = "auto",
    network: str | None = None,
    *,
    option: str = "--network",
) -> Cluster:
    """The cluster that `text` describes.

    Args:
        precision: what it computes in.
        network: the link between hosts, as `spec.network.link` reads it.
        option: how a user gives it.

    Raises:
        InputError: the text is wrong, a card is not known or cannot compute in what it is to,
            hosts without a link between them, or such a link for one host.
    """
    with placed("--cluster"):
        hosts = list(_hosts(text))
    if not hosts:
        raise InputError(f"there are no hosts in '{text.strip()}'")
    if len(hosts) == 1 and network is not None:
        raise InputError(
            f"'{network}' would link hosts, and there is only one",
            where=option,
            fix="leave it out; semicolons separate hosts",
        )
    if len(hosts) > 1 and network is None:
        raise InputError(
            f"nothing says how the {len(hosts)} hosts are linked",
            where="--cluster",
            fix=f"give it: {option} 25GbE (or 100GbE, ib-hdr, '12 GB/s'); cards of one host are "
            "joined by commas",
        )
    between = None if network is None else _link(network, option)
    known = {c.card.name: c.card for host in hosts for c in host}
    check_vendors(known.values())
    check_count(sum(c.count for host in hosts for c in host))
    there = Cluster(
        classes=tuple(device_class(card) for _, card in sorted(known.items())),
        devices=tuple(_devices(hosts)),
        network=network_of(list(known.values()), between),
    )
    dtypes = compute_dtypes(precision, there)
    classes = tuple(with_peak(c, known[c.name], dtypes[c.name]) for c in there.classes)
    return there.model_copy(update={"classes": classes})


def check_count(devices: int) -> None:
    """Refuse more devices than a cluster may have."""
    if devices > MOST_DEVICES:
        raise InputError(f"a cluster may have up to {MOST_DEVICES} devices")


def check_vendors(known: Iterable[Card]) -> None:
    """Refuse cards whose collectives do not understand each other.

    Raises:
        InputError: there are cards of both vendors.
    """
    by_vendor = {card.vendor: card.name for card in known}
    if len(by_vendor) > 1:
        raise InputError(
            f"{by_vendor['nvidia']} and {by_vendor['amd']} cannot train together",
            why="NCCL of NVIDIA and RCCL of AMD form no common group",
            fix="plan for the cards of each vendor alone",
        )


def device_class(card: Card) -> DeviceClass:
    """The class of a card of the catalogue, without a peak: that is of a dtype."""
    return DeviceClass(
        name=card.name,
        accelerator="cuda",
        memory_bytes=card.visible_bytes,
        product=card.product,
        compute_capability=card.compute_capability or "",
        gfx_target=card.gfx_target or "",
    )


def with_peak(device_class: DeviceClass, card: Card, dtype: ComputeDtype) -> DeviceClass:
    """The class with the datasheet's rate in the dtype that it computes in."""
    return device_class.model_copy(update={"peak_flops_per_s": flops_per_s(card, dtype)})


def network_of(known: list[Card], between: Link | None) -> Network:
    """The links of a cluster of these cards: two cards of one kind by their own fabric, all others
    by the slower of their slots."""
    return Network(between=between, exceptions=links_inside({card.name: card for card in known}))


def links_inside(known: Mapping[str, Card]) -> tuple[LinkOf, ...]:
    """The links inside hosts between cards, by the names of their classes."""
    pairs = combinations_with_replacement(known, 2)
    return tuple(
        LinkOf(where="inside", classes=pair, link=_inside(*(known[name] for name in pair)))
        for pair in pairs
    )


def _inside(one: Card, other: Card) -> Link:
    if one.name == other.name and one.device_link and one.device_link.kind in _FABRICS:
        kind = one.device_link.kind.value
        return Link.stated(one.device_link.bandwidth * FABRIC_PART, LATENCY_S, kind)
    slots = [_slot(card) for card in (one, other)]
    slowest = min(slots, key=lambda slot: slot.bandwidth)
    name = f"PCIe {slowest.generation}.0 x{slowest.lanes}"
    return Link.stated(slowest.bandwidth * PCIE_PART, LATENCY_S, name)


def _slot(card: Card) -> PcieLink:
    """The slot of a card; one that hangs on its CPU's module reaches others as PCIe 5.0 would."""
    if isinstance(card.host_link, CoherentLink):
        return PcieLink(kind="pcie", generation=5, lanes=16)
    return card.host_link


def _hosts(text: str) -> Iterator[tuple[Cards, ...]]:
    for part in text.split(";"):
        repeated = _HOSTS.match(part.strip())
        times, inside = (int(repeated[1]), repeated[2]) if repeated else (1, part)
        host = tuple(cards(some) for some in inside.split(","))
        check_count(times)
        yield from (host,) * times


def _devices(hosts: list[tuple[Cards, ...]]) -> Iterator[Device]:
    width = len(str(len(hosts) - 1))
    numbers: dict[str, int] = {}
    for number, host in enumerate(hosts):
        ordinal = 0
        for some in host:
            for _ in range(some.count):
                name = some.card.name
                index = numbers[name] = numbers.get(name, -1) + 1
                yield Device(
                    id=f"{name}-{index:06d}" if len(hosts) > 1 else f"{name}-{index}",
                    device_class=name,
                    host=f"host-{number:0{width}d}",
                    ordinal=ordinal,
                )
                ordinal += 1


def _link(text: str, option: str) -> Link:
    try:
        return link(text)
    except ValueError as error:
        raise InputError(str(error), where=option) from None
