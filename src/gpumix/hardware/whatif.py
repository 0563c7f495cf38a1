"""What a cluster would be with a few cards more or less, or other links: a profile for each.

Cards that are there already keep their measured times. What is new comes from the catalogue; where
cards at hand tell how far the catalogue is off for this model, estimates are set right by that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import exp, log

from gpumix.hardware.catalogue import find
from gpumix.hardware.describe import Cards, cards, device_class, network_of
from gpumix.hardware.estimate import estimate_class, rescaled
from gpumix.spec.cluster import Cluster, Device, DeviceClass
from gpumix.spec.errors import InputError
from gpumix.spec.network import Network, link
from gpumix.spec.profile import ClassProfile, Profile

NEW_HOST = "new-host"


def added(profile: Profile, text: str) -> Profile:
    """The profile with more devices: of a class that is there ("2x p40" or the class's own name),
    on its first host, or of the catalogue, on a host of their own if there are several hosts.

    Raises:
        InputError: neither the cluster nor the catalogue knows them.
    """
    count, name = _count_of_class(profile, text)
    if name is None:
        new = cards(text)
        count, profile, name = new.count, _with_class(profile, new), new.card.name
    devices = _more(profile.cluster, name, count)
    cluster = profile.cluster.model_copy(update={"devices": (*profile.cluster.devices, *devices)})
    return profile.model_copy(update={"cluster": cluster})


def removed(profile: Profile, text: str) -> Profile:
    """The profile without a class, or without so many devices of it.

    Raises:
        InputError: there is no such class, or nothing would be left.
    """
    count, name = _count_of_class(profile, text)
    if name is None:
        known = ", ".join(c.name for c in profile.cluster.classes)
        raise InputError(
            f"there is no class '{text.strip()}' to remove", why=f"the cluster has {known}"
        )
    explicit = text.strip()[0].isdigit() and "x" in text and text.strip() != name
    members = profile.cluster.members(name)
    if explicit and count > len(members):
        raise InputError(f"there are only {len(members)} devices of class '{name}'")
    gone = {d.id for d in (members[-count:] if explicit else members)}
    devices = tuple(d for d in profile.cluster.devices if d.id not in gone)
    if not devices:
        raise InputError(f"without '{text.strip()}' no device is left")
    left = {d.device_class for d in devices}
    cluster = profile.cluster.model_copy(
        update={
            "devices": devices,
            "classes": tuple(c for c in profile.cluster.classes if c.name in left),
        }
    )
    classes = tuple(c for c in profile.classes if c.device_class in left)
    return profile.model_copy(update={"cluster": cluster, "classes": classes})


def relinked(profile: Profile, text: str) -> Profile:
    """The profile with another link: between hosts, or, on one host, between its devices.

    Raises:
        InputError: the text names no link.
    """
    try:
        new = link(text)
    except ValueError as error:
        raise InputError(str(error), where="--network") from None
    known = profile.cluster.network
    several = len({d.host for d in profile.cluster.devices}) > 1
    if not several:
        stated = Network(inside=new)
    elif known is None:
        stated = Network(inside=new, between=new)
    else:
        stated = known.model_copy(update={"between": new})
    cluster = profile.cluster.model_copy(update={"network": stated})
    # Measured times are of the links that were there.
    return profile.model_copy(update={"cluster": cluster, "network": ()})


def _count_of_class(profile: Profile, text: str) -> tuple[int, str | None]:
    """ "2x p40", "2xp40" or "p40" as a number and the cluster's class of that name, if there is
    one."""
    names = {c.name for c in profile.cluster.classes}
    word = text.strip()
    if word in names:
        return 1, word
    number, _, rest = word.partition("x")
    count, rest = (int(number), rest.strip()) if number.strip().isdigit() else (1, word)
    name = class_named(names, rest)
    return (0, None) if name is None else (count, name)


def class_named(names: Collection[str], text: str) -> str | None:
    """The class that `text` means: by its own name, or as the catalogue understands it."""
    if text in names:
        return text
    try:
        card = find(text)
    except InputError:
        return None
    return card.name if card.name in names else None


def _with_class(profile: Profile, new: Cards) -> Profile:
    if any(c.emulated for c in profile.cluster.classes):
        raise InputError(
            "real cards cannot join emulated devices",
            fix="add devices of the classes that there are, or plan for --cluster",
        )
    model, dtype = profile.model, profile.compute_dtype
    made = device_class(new.card, dtype)
    if made.name in {c.name for c in profile.cluster.classes}:
        return profile
    (estimated,) = rescaled([estimate_class(new.card, model, dtype, made.name)], _off_by(profile))
    classes = (*profile.cluster.classes, made)
    cluster = profile.cluster.model_copy(
        update={"classes": classes, "network": _links(profile.cluster, classes)}
    )
    # One more kind of card is one more kind of link, and the old times say nothing of it.
    return profile.model_copy(update={"cluster": cluster, "classes": (*profile.classes, estimated)})


def _links(cluster: Cluster, classes: tuple[DeviceClass, ...]) -> Network | None:
    """Stated links are stated for the new cards too; measured ones count as they are."""
    if cluster.network is None:
        return None
    known = [find(c.name) for c in classes]
    made = network_of(known, cluster.network.between)
    return made.model_copy(update={"exceptions": (*cluster.network.exceptions, *made.exceptions)})


def _off_by(profile: Profile) -> float:
    """How much longer the measured cards take than their estimates, as a geometric mean; 1 where
    none is in the catalogue."""
    ratios = []
    for measured in profile.classes:
        product = profile.cluster.class_named(measured.device_class).product
        if measured.estimated or not product:
            continue
        try:
            card = find(product)
        except InputError:
            continue
        expected = estimate_class(card, profile.model, profile.compute_dtype, measured.device_class)
        ratios.append(log(_seconds(profile, measured) / _seconds(profile, expected)))
    return exp(sum(ratios) / len(ratios)) if ratios else 1.0


def _seconds(profile: Profile, of: ClassProfile) -> float:
    """Of all calls, for one sample in the largest micro-batch that both know."""
    kinds = Counter(profile.model.kind_of_call)
    total = 0.0
    for kind, count in kinds.items():
        for curve in (of.units[kind].forward, of.units[kind].backward):
            total += count * curve.values[-1] / curve.sizes[-1]
    return total


def _more(cluster: Cluster, name: str, count: int) -> list[Device]:
    members, hosts = cluster.members(name), sorted({d.host for d in cluster.devices})
    host = members[0].host if members else hosts[0] if len(hosts) == 1 else NEW_HOST
    first = max((d.ordinal for d in cluster.devices if d.host == host), default=-1) + 1
    taken = {d.id for d in cluster.devices}
    ids = (f"{name}-new-{number}" for number in range(len(taken) + count))
    free = [id_ for id_ in ids if id_ not in taken][:count]
    return [
        Device(id=id_, device_class=name, host=host, ordinal=first + offset)
        for offset, id_ in enumerate(free)
    ]
