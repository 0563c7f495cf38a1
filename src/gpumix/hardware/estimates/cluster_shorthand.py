"""Clusters described in a line such as "4x rtx3090, 2x p40", from catalogue cards, present or not.

Commas or plus signs join cards of one host, semicolons separate hosts, and
"3 hosts of 8x a100-80gb-sxm" repeats a host. The link between hosts must
be stated; inside a host the cards' own links apply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement

from gpumix.hardware.estimates.gpu_catalogue import (
    Card,
    CoherentLink,
    DeviceLinkKind,
    PcieLink,
    find_card,
    find_other_forms,
)
from gpumix.hardware.estimates.roofline import get_peak_flops_per_s
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.cluster.network import ClassPairLink, Link, Network, parse_link
from gpumix.schema.errors import InputError
from gpumix.schema.plan.dtypes import Precision, choose_compute_dtypes
from gpumix.schema.plan.stage import ComputeDtype
from gpumix.schema.reading.error_location import locate_errors

_HOSTS = re.compile(r"^(\d+)\s+hosts?\s+of\s+(.+)$")
_TIMES = r"\s*[xX×*]\s*(?!(?<=[xX])[tT][xX]?\b)"  # not of a Radeon: 7900xtx, 9070xt
_CARDS = re.compile(rf"^(?:(\d{{1,12}}){_TIMES})?([A-Za-z0-9].*)$")
_COUNT_BEHIND = re.compile(r"^([A-Za-z0-9].*?)(?:\s+|(?<=\d))[xX×*]\s*(\d{1,12})$")
_COUNT_FIRST = re.compile(rf"^\d+{_TIMES}")
_COUNT_ALONE = re.compile(r"^(\d{1,3})\s+([A-Za-z].*)$")  # longer ones are names: 3090 Ti
_NUMBERS = re.compile(r"^(\d{3,5})\s*[xX×*]\s*(\d{1,2})$")  # 3090 x 4: a name, and how many
_CARD_SEPARATOR = re.compile(r"[,+]")
MOST_DEVICES = 200_000

# NVLink, Infinity Fabric and Ethernet shared by all cards of a host; a bridge joins only two.
_FABRICS = (DeviceLinkKind.NVLINK, DeviceLinkKind.INFINITY_FABRIC, DeviceLinkKind.ETHERNET)
FABRIC_PART, PCIE_PART, LATENCY_S = 0.8, 0.75, 8e-6


@dataclass(frozen=True)
class CardCount:
    """A number of cards of one type."""

    count: int
    card: Card


def parse_cards(text: str) -> CardCount:
    """Parse a number of cards such as "4x rtx3090" or "p40".

    Raises:
        InputError: the format is wrong, or the catalogue does not know the card.
    """
    count, name = split_count(text)
    return CardCount(count or 1, find_card(name))


def split_count(text: str) -> tuple[int | None, str]:
    """Split "4x rtx3090", "4 rtx3090" or "rtx3090 x4" into the number, None if missing, and the
    rest.

    Raises:
        InputError: the format is wrong, or the number is zero.
    """
    wanted = text.strip()
    if numbers := _NUMBERS.match(wanted):
        wanted = f"{numbers[2]}x {numbers[1]}"
    elif (behind := _COUNT_BEHIND.match(wanted)) and not _COUNT_FIRST.match(wanted):
        wanted = f"{behind[2]}x {behind[1]}"
    elif alone := _COUNT_ALONE.match(wanted):
        wanted = f"{alone[1]}x {alone[2]}"
    found = _CARDS.match(wanted)
    if found is None or (found[1] and int(found[1]) == 0):
        raise InputError(
            f"'{text.strip()}' is not a number of cards",
            code="card-count-invalid",
            fix="write them as '4x rtx3090'",
        )
    return (int(found[1]) if found[1] else None), found[2]


def parse_cluster(
    text: str,
    precision: Precision = "auto",
    network: str | None = None,
    *,
    option: str = "--network",
) -> Cluster:
    """Build the cluster described by `text`.

    Args:
        precision: compute dtypes.
        network: the link between hosts, parsed by `schema.cluster.network.parse_link`.
        option: the command-line option of `network`, for errors.

    Raises:
        InputError: the text is wrong, a card is unknown or does not support the dtype, hosts lack a
            link, or a single host has one.
    """
    with locate_errors("--cluster"):
        hosts = list(_parse_hosts(text))
    if not hosts:
        raise InputError(
            f"there are no hosts in '{text.strip()}'",
            code="no-hosts",
            fix="write 2 hosts of 8x a100",
        )
    if len(hosts) == 1 and network is not None:
        raise InputError(
            f"'{network}' would link hosts, and there is only one",
            code="network-with-one-host",
            where=option,
            fix="leave it out; semicolons separate hosts",
        )
    if len(hosts) > 1 and network is None:
        raise InputError(
            f"nothing says how the {len(hosts)} hosts are linked",
            code="network-missing",
            where="--cluster",
            fix=f"give it: {option} 25GbE (or 100GbE, ib-hdr, '12 GB/s'); cards of one host are "
            "joined by commas",
        )
    between = None if network is None else read_link(network, option)
    known = {c.card.name: c.card for host in hosts for c in host}
    check_vendors(known.values())
    check_count(sum(c.count for host in hosts for c in host))
    there = Cluster(
        classes=tuple(make_device_class(card) for _, card in sorted(known.items())),
        devices=tuple(_devices(hosts)),
        network=make_network(list(known.values()), between),
    )
    return _with_peaks(there, known, precision)


def with_catalogue_cards(cluster: Cluster, precision: Precision) -> Cluster:
    """Return an existing or described cluster with classes named as in the catalogue, with their
    datasheet rates, and with the cards' own links unless the cluster states others.

    Raises:
        InputError: devices are emulated or unknown to the catalogue, a card does not support the
            dtype, or nothing says how hosts are linked.
    """
    if cluster.emulated:
        raise InputError(
            "emulated devices have no datasheet to estimate from",
            code="datasheet-missing",
            fix="measure them with a job: gpumix plan JOB.yaml",
        )
    cards = {c.name: _card_of_class(c) for c in cluster.classes}
    network = cluster.network
    if network is None:
        if len({d.host for d in cluster.devices}) > 1:
            raise InputError(
                "nothing says how the hosts are linked",
                code="network-missing",
                fix="state it in the cluster file: `network: {between: 25GbE}`",
            )
        network = make_network(list(cards.values()), None)
    else:
        new = {card.name: name for name, card in cards.items() if card.name != name}
        network = network.as_of(new).among([card.name for card in cards.values()])
    memory = {
        card.name: min(c.memory_bytes for c in cluster.classes if cards[c.name] is card)
        for card in cards.values()
    }
    classes = [
        make_device_class(card).model_copy(update={"memory_bytes": memory[card.name]})
        for card in {card.name: card for card in cards.values()}.values()
    ]
    there = Cluster(
        classes=tuple(classes),
        devices=tuple(
            d.model_copy(update={"device_class": cards[d.device_class].name})
            for d in cluster.devices
        ),
        network=network,
    )
    return _with_peaks(there, {card.name: card for card in cards.values()}, precision)


def _with_peaks(cluster: Cluster, known: Mapping[str, Card], precision: Precision) -> Cluster:
    """Return the cluster with the datasheet rate of each class in its compute dtype."""
    dtypes = choose_compute_dtypes(precision, cluster)
    classes = tuple(with_peak(c, known[c.name], dtypes[c.name]) for c in cluster.classes)
    return cluster.model_copy(update={"classes": classes})


def _card_of_class(device_class: DeviceClass) -> Card:
    card = find_class_card(device_class)
    if card is None:
        name = device_class.product or device_class.name
        raise InputError(
            f"the catalogue has no card '{name}', so there is nothing to estimate from",
            code="card-unknown",
            fix="measure it with a job: gpumix plan JOB.yaml",
        )
    return card


def find_class_card(device_class: DeviceClass) -> Card | None:
    """Return the card of a class; None if the catalogue does not know it."""
    for name in (device_class.product, device_class.name):
        try:
            return find_card(name, device_class.memory_bytes)
        except InputError:
            continue
    return None


def check_count(devices: int) -> None:
    """Raise an InputError for more devices than a cluster may have."""
    if devices > MOST_DEVICES:
        raise InputError(
            f"a cluster may have up to {MOST_DEVICES} devices",
            code="too-many-devices",
            fix="name fewer",
        )


_COLLECTIVES = {
    ("nvidia", "cuda"): "NCCL of NVIDIA",
    ("amd", "cuda"): "RCCL of AMD",
    ("intel", "xpu"): "XCCL of Intel",
    ("intel", "hpu"): "HCCL of Gaudi",
}


def check_vendors(known: Iterable[Card]) -> None:
    """Refuse cards of different vendors, which share no collectives, nor do Gaudi and Intel's GPUs.

    Raises:
        InputError: the cards are of several vendors.
    """
    by_library = {_COLLECTIVES[card.vendor, card.accelerator]: card.name for card in known}
    if len(by_library) > 1:
        (library, name), (other_library, other), *_ = (
            (found, by_library[found]) for found in _COLLECTIVES.values() if found in by_library
        )
        raise InputError(
            f"{name} and {other} cannot train together",
            code="cards-not-combinable",
            why=f"{library} and {other_library} form no common group",
            fix="plan for the cards of each vendor alone",
        )


def make_device_class(card: Card) -> DeviceClass:
    """Return the device class of a catalogue card, without a peak, which depends on the dtype."""
    return DeviceClass(
        name=card.name,
        accelerator=card.accelerator,
        memory_bytes=card.visible_bytes,
        product=card.product,
        compute_capability=card.compute_capability or "",
        gfx_target=card.gfx_target or "",
        xe_target=card.xe_target or "",
    )


def with_peak(device_class: DeviceClass, card: Card, dtype: ComputeDtype) -> DeviceClass:
    """Add the datasheet rate in the compute dtype to a device class."""
    return device_class.model_copy(update={"peak_flops_per_s": get_peak_flops_per_s(card, dtype)})


def make_network(known: list[Card], between: Link | None) -> Network:
    """Return the links of a cluster: equal cards use their own fabric, all other pairs the slower
    of the two PCIe slots."""
    return Network(
        between=between, exceptions=make_links_inside({card.name: card for card in known})
    )


def make_links_inside(known: Mapping[str, Card]) -> tuple[ClassPairLink, ...]:
    """Return the links inside hosts between cards, by class name."""
    pairs = combinations_with_replacement(known, 2)
    return tuple(
        ClassPairLink(
            where="inside", classes=pair, link=_link_inside(*(known[name] for name in pair))
        )
        for pair in pairs
    )


def _link_inside(one: Card, other: Card) -> Link:
    if one.name == other.name and one.device_link and one.device_link.kind in _FABRICS:
        kind = one.device_link.kind.value
        return Link.stated(one.device_link.bandwidth * FABRIC_PART, LATENCY_S, kind)
    slots = [_get_pcie_slot(card) for card in (one, other)]
    slowest = min(slots, key=lambda slot: slot.bandwidth)
    name = f"PCIe {slowest.generation}.0 x{slowest.lanes}"
    return Link.stated(slowest.bandwidth * PCIE_PART, LATENCY_S, name)


def _get_pcie_slot(card: Card) -> PcieLink:
    """Return the PCIe slot of a card; a card on a CPU module reaches other cards like PCIe 5.0."""
    if isinstance(card.host_link, CoherentLink):
        return PcieLink(kind="pcie", generation=5, lanes=16)
    return card.host_link


def _parse_hosts(text: str) -> Iterator[tuple[CardCount, ...]]:
    for times, inside in _split_hosts(text):
        host = tuple(parse_cards(some) for some in _CARD_SEPARATOR.split(inside))
        check_count(times)
        yield from (host,) * times


def _split_hosts(text: str) -> Iterator[tuple[int, str]]:
    """Yield a number of hosts and their cards, for each kind of host."""
    for part in text.split(";"):
        repeated = _HOSTS.match(part.strip())
        yield (int(repeated[1]), repeated[2]) if repeated else (1, part)


def explain_short_names(text: str) -> list[str]:
    """Say which card each name in a cluster stands for that fits several forms of one card, or a
    GPU of two devices."""
    names = [
        split_count(some)[1].strip()
        for _, host in _split_hosts(text)
        for some in _CARD_SEPARATOR.split(host)
    ]
    return [told for name in dict.fromkeys(names) if (told := _explain_short_name(name))]


def _explain_short_name(name: str) -> str:
    card, others = find_card(name), find_other_forms(name)
    if others:
        return f"{name} is {card.name} (not {', '.join(one.name for one in others)})"
    half = card.name.rpartition("-")[2]
    if half in ("gcd", "tile") and half not in name.lower():
        return f"{name} is {card.name}, half of one: each is two devices"
    return ""


def _devices(hosts: list[tuple[CardCount, ...]]) -> Iterator[Device]:
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


def read_link(text: str, option: str) -> Link:
    """Parse a link.

    Args:
        option: of the command line, for errors.
    """
    try:
        return parse_link(text)
    except ValueError as error:
        raise InputError(
            str(error), code="link-invalid", where=option, fix=f"write it as {option} 25GbE"
        ) from None
