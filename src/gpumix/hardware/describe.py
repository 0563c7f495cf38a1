"""A cluster in one line, such as "4x rtx3090, 2x p40": cards of the catalogue, before any is there.

Commas join cards of one host, semicolons separate hosts, and "3 hosts of 8x a100-80gb-sxm" repeats
one. Hosts need a link that is stated; inside a host the cards' own links serve.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpumix.hardware.catalogue import Card, CoherentLink, DeviceLinkKind, PcieLink, find
from gpumix.hardware.roofline import flops_per_s
from gpumix.spec.cluster import Cluster, Device, DeviceClass
from gpumix.spec.errors import InputError
from gpumix.spec.network import Link, LinkOf, Network, link
from gpumix.spec.plan import ComputeDtype

_HOSTS = re.compile(r"^(\d+)\s+hosts?\s+of\s+(.+)$")
_CARDS = re.compile(r"^(?:(\d+)\s*[x*]\s*)?([A-Za-z0-9].*)$")
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
    found = _CARDS.match(text.strip())
    if found is None or int(found[1] or 1) == 0:
        raise InputError(
            f"'{text.strip()}' is not a number of cards", fix="write them as '4x rtx3090'"
        )
    return Cards(int(found[1] or 1), find(found[2]))


def cluster(text: str, dtype: ComputeDtype, network: str | None = None) -> Cluster:
    """The cluster that `text` describes.

    Args:
        network: the link between hosts, as `spec.network.link` reads it.

    Raises:
        InputError: the text is wrong, a card is not known, or hosts without a link between them.
    """
    hosts = list(_hosts(text))
    if len(hosts) > 1 and network is None:
        raise InputError(
            f"nothing says how the {len(hosts)} hosts are linked",
            fix="give it: --network 25GbE (or 100GbE, ib-hdr, '12 GB/s'); cards of one host are "
            "joined by commas",
        )
    known = {c.card.name: c.card for host in hosts for c in host}
    if sum(c.count for host in hosts for c in host) > MOST_DEVICES:
        raise InputError(f"a cluster may have up to {MOST_DEVICES} devices")
    return Cluster(
        classes=tuple(device_class(card, dtype) for _, card in sorted(known.items())),
        devices=tuple(_devices(hosts)),
        network=network_of(list(known.values()), None if network is None else _link(network)),
    )


def device_class(card: Card, dtype: ComputeDtype) -> DeviceClass:
    """The class of a card of the catalogue."""
    return DeviceClass(
        name=card.name,
        accelerator="cuda",
        memory_bytes=card.visible_bytes,
        product=card.product,
        compute_capability=card.compute_capability or "",
        peak_flops_per_s=flops_per_s(card, dtype),
    )


def network_of(known: list[Card], between: Link | None) -> Network:
    """The links of a cluster of these cards: two cards of one kind by their own fabric, all others
    by the slower of their slots."""
    links = [
        LinkOf(where="inside", classes=(a.name, b.name), link=_inside(a, b))
        for i, a in enumerate(known)
        for b in known[i:]
    ]
    return Network(between=between, exceptions=tuple(links))


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
        if times > MOST_DEVICES:
            raise InputError(f"a cluster may have up to {MOST_DEVICES} devices")
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


def _link(text: str) -> Link:
    try:
        return link(text)
    except ValueError as error:
        raise InputError(str(error), where="--network") from None
