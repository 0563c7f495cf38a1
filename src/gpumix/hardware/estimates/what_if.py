"""What-if profiles: a cluster with a few devices more or less, or with different links.

Existing devices keep their measured times. New ones come from the catalogue; estimates are
corrected by the catalogue's error for this model on existing devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from math import exp, log
from typing import Any, TypeVar

from gpumix.cost.memory_layout.curves import interpolate_seconds
from gpumix.hardware.estimates.cluster_shorthand import (
    check_count,
    check_vendors,
    find_class_card,
    make_device_class,
    make_links_inside,
    read_link,
    split_count,
    with_peak,
)
from gpumix.hardware.estimates.estimate import estimate_class, make_slower_class, scale_estimates
from gpumix.hardware.estimates.gpu_catalogue import Card, find_card
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.cluster.network import Link, Network
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError
from gpumix.schema.plan.dtypes import get_dtype_support
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype
from gpumix.schema.profile.profile import (
    ClassProfile,
    EndParameters,
    Profile,
    RootParameter,
    RootUnit,
    TensorParallelProfile,
    UnitKind,
)
from gpumix.schema.reading.error_text import find_nearest, suggest

U = TypeVar("U", UnitKind, RootUnit)
S = TypeVar("S", EndParameters, RootParameter)

NEW_HOST = "new-host"


def add_devices(profile: Profile, text: str) -> Profile:
    """Return the profile with more devices: of an existing class ("2x p40" or the class name) on
    the class's first host, or of the catalogue, on a new host if there are several hosts.

    Raises:
        InputError: neither the cluster nor the catalogue knows the class.
    """
    count, name = _count_of_class(profile, text)
    check_count(len(profile.cluster.devices) + (count or 1))
    if name is None:
        _refuse_emulated(profile, text)
        card = find_card(split_count(text)[1])
        profile, name = _with_class(profile, card), card.name
    devices = _more(profile.cluster, name, count or 1)
    cluster = profile.cluster.model_copy(update={"devices": (*profile.cluster.devices, *devices)})
    return profile.model_copy(update={"cluster": cluster})


def _refuse_emulated(profile: Profile, text: str) -> None:
    if profile.cluster.emulated:
        raise InputError(
            f"there is no class '{split_count(text)[1]}' to add, and real cards cannot join "
            "emulated devices",
            code="class-to-add-unknown",
            fix=f"{_classes_like(profile, text)}; or plan for --cluster",
        )


def _classes_like(profile: Profile, text: str) -> str:
    """Return the fix for an unknown class: the class probably meant, and all classes."""
    names = [one.name for one in profile.cluster.classes]
    return suggest(find_nearest(split_count(text)[1], names), names, "the cluster has")


def remove_devices(profile: Profile, text: str) -> Profile:
    """Return the profile without a class, or without a number of its devices.

    Raises:
        InputError: the class does not exist, or no device would be left.
    """
    count, name = _count_of_class(profile, text)
    if name is None:
        raise InputError(
            f"there is no class '{text.strip()}' to remove",
            code="class-to-remove-unknown",
            fix=_classes_like(profile, text),
        )
    members = profile.cluster.members(name)
    if count is not None and count > len(members):
        raise InputError(
            f"{count} devices of class '{name}' cannot be removed: there "
            f"{'is' if len(members) == 1 else 'are'} {len(members)}",
            code="too-few-devices-to-remove",
            fix=f"remove the class: --remove {name}",
        )
    gone = {d.id for d in members[-(count or len(members)) :]}
    if len(gone) == len(profile.cluster.devices):
        raise InputError(
            f"without '{text.strip()}' no device is left", code="no-device-left", fix="remove fewer"
        )
    return drop_devices(profile, gone)


def drop_devices(profile: Profile, gone: Collection[str]) -> Profile:
    """Return the profile without the devices `gone`, by id; some must be left."""
    cluster = profile.cluster.only({d.id for d in profile.cluster.devices} - set(gone))
    left = {one.name for one in cluster.classes}
    classes = tuple(c for c in profile.classes if c.device_class in left)
    tp_profiles = tuple(
        tp_profile.model_copy(
            update={
                "classes": tuple(c for c in tp_profile.classes if c.device_class in left),
                "told": {name: told for name, told in tp_profile.told.items() if name in left},
            }
        )
        for tp_profile in profile.tp_profiles
        if any(c.device_class in left for c in tp_profile.classes)
    )
    return profile.model_copy(
        update={"cluster": cluster, "classes": classes, "tp_profiles": tp_profiles}
    )


def scale_memory(profile: Profile, parts: Mapping[str, float]) -> Profile:
    """Scale the memory of classes by `parts`, by class name."""
    classes = tuple(
        c.model_copy(update={"memory_bytes": int(c.memory_bytes * parts.get(c.name, 1.0))})
        for c in profile.cluster.classes
    )
    cluster = profile.cluster.model_copy(update={"classes": classes})
    return profile.model_copy(update={"cluster": cluster})


def with_slower(profile: Profile, factors: Mapping[str, float]) -> Profile:
    """Return the profile with devices slowed by `factors`, by device id. Slowed devices of a class
    with equal factors form a new class."""
    all_devices = profile.cluster.devices
    named = {
        device.id: (device.device_class, round(factors.get(device.id, 1.0), 2))
        for device in all_devices
    }
    new = {
        f"{name}-x{factor:g}": (name, factor)
        for name, factor in sorted(set(named.values()))
        if factor != 1.0
    }
    of_pair = {pair: name for name, pair in new.items()}
    now = {d.id: of_pair.get(named[d.id], d.device_class) for d in all_devices}
    devices = tuple(d.model_copy(update={"device_class": now[d.id]}) for d in all_devices)
    cluster, known = profile.cluster, {c.device_class: c for c in profile.classes}
    classes = {c.name: c for c in cluster.classes}
    more = [classes[of].model_copy(update={"name": name}) for name, (of, _) in new.items()]
    left = {device.device_class for device in devices}
    network = cluster.network and cluster.network.as_of({n: of for n, (of, _) in new.items()})
    cluster = cluster.model_copy(
        update={
            "devices": devices,
            "classes": tuple(c for c in (*cluster.classes, *more) if c.name in left),
            "network": network and network.among(left),
        }
    )
    tp_profiles = tuple(
        tp_profile.model_copy(update=_slow_down_tp_profile(tp_profile, new))
        for tp_profile in profile.tp_profiles
    )
    slower = [make_slower_class(known[of], factor, name) for name, (of, factor) in new.items()]
    update = {
        "cluster": cluster,
        "classes": (*profile.classes, *slower),
        "tp_profiles": tp_profiles,
    }
    return drop_devices(profile.model_copy(update=update), ())


def _slow_down_tp_profile(
    tp_profile: TensorParallelProfile, new: Mapping[str, tuple[str, float]]
) -> dict[str, Any]:
    known = {c.device_class: c for c in tp_profile.classes}
    slower = [make_slower_class(known[of], f, name) for name, (of, f) in new.items() if of in known]
    told = {name: tp_profile.told[of] for name, (of, _) in new.items() if of in tp_profile.told}
    return {"classes": (*tp_profile.classes, *slower), "told": tp_profile.told | told}


def set_link_between_hosts(profile: Profile, text: str) -> Profile:
    """Return the profile with another link between hosts.

    Raises:
        InputError: the text names no link, or there is only one host.
    """
    new = read_link(text, "--network")
    known = profile.cluster.network
    if len({d.host for d in profile.cluster.devices}) == 1:
        raise InputError(
            f"'{text}' would link hosts, and there is only one",
            code="network-with-one-host",
            where="--network",
            fix=f"for the link between the devices of a host: --inside {text}",
        )
    if known is None:
        return _with_network(profile, _own_links(profile.cluster, new))
    inside = tuple(e for e in known.exceptions if e.where == "inside")
    return _with_network(profile, known.model_copy(update={"between": new, "exceptions": inside}))


def set_link_inside_hosts(profile: Profile, text: str) -> Profile:
    """Return the profile with another link between the devices of each host.

    Raises:
        InputError: the text names no link, or the link between several hosts is not stated.
    """
    new = read_link(text, "--inside")
    known = profile.cluster.network
    if len({d.host for d in profile.cluster.devices}) == 1:
        return _with_network(profile, Network(inside=new))
    if known is None:
        raise InputError(
            "links inside hosts and between them were measured together",
            code="links-measured-together",
            where="--inside",
            fix="state those that there are in the cluster: `network: {between: 25GbE, ...}`",
        )
    between = tuple(e for e in known.exceptions if e.where == "between")
    return _with_network(profile, known.model_copy(update={"inside": new, "exceptions": between}))


def _with_network(profile: Profile, stated: Network) -> Profile:
    """Set the network, dropping measured times, which belong to the old links."""
    cluster = profile.cluster.model_copy(update={"network": stated})
    return profile.model_copy(update={"cluster": cluster, "network": ()})


def _count_of_class(profile: Profile, text: str) -> tuple[int | None, str | None]:
    """Split "2x p40", "2xp40" or "p40" into the number and the cluster's class, None if missing."""
    names = {c.name for c in profile.cluster.classes}
    if text.strip() in names:
        return None, text.strip()
    count, rest = split_count(text)
    return count, class_named(names, rest)


def class_named(names: Collection[str], text: str) -> str | None:
    """Return the class meant by `text`, a class name or a catalogue name."""
    if text in names:
        return text
    try:
        card = find_card(text)
    except InputError:
        return None
    return card.name if card.name in names else None


def _with_class(profile: Profile, new: Card) -> Profile:
    """Return the profile with a catalogue class added, without devices."""
    others = (find_class_card(c) for c in profile.cluster.classes)
    check_vendors([new, *(card for card in others if card is not None)])
    plain = make_device_class(new)
    dtype = get_dtype_support(plain).usual
    made = with_peak(plain, new, dtype)
    profile = _add_model_dtype(profile, dtype)
    model = profile.model_in(dtype)
    estimate = estimate_class(
        new,
        model,
        made.name,
        optimizer_bytes=profile.optimizer_bytes_per_element,
        optimizer_state=profile.optimizer_state,
    )
    cluster = profile.cluster.model_copy(
        update={
            "classes": (*profile.cluster.classes, made),
            "network": _with_links(profile.cluster, new),
        }
    )
    classes = (*profile.classes, *scale_estimates([estimate], _compute_correction(profile)))
    return profile.model_copy(update={"cluster": cluster, "classes": classes})


def _add_model_dtype(profile: Profile, dtype: ComputeDtype) -> Profile:
    """Return the profile with the model in `dtype`. If not measured, memory is derived from the
    nearest dtype: never less than needed."""
    known = (profile.model, *profile.other_models)
    if any(m.compute_dtype == dtype for m in known):
        return profile
    width = DTYPE_BYTES[dtype]
    nearest = min(known, key=lambda m: abs(DTYPE_BYTES[m.compute_dtype] - width))
    times = max(1, width // DTYPE_BYTES[nearest.compute_dtype])
    model = nearest.model_copy(
        update={
            "compute_dtype": dtype,
            "kinds": tuple(_enlarged(kind, times) for kind in nearest.kinds),
            "root": _enlarged(nearest.root, times),
        }
    )
    return profile.model_copy(update={"other_models": (*profile.other_models, model)})


def _enlarged(unit: U, times: int) -> U:
    changes: dict[str, Any] = {
        name: curve.scaled(times) for name, curve in unit if isinstance(curve, Curve)
    }
    changes["frozen_bytes"] = _enlarged_bytes(unit, times)
    if isinstance(unit, UnitKind):
        changes["outputs"] = {place: one.scaled(times) for place, one in unit.outputs.items()}
    else:
        changes["before"], changes["after"] = (
            _frozen(unit.before, times),
            _frozen(unit.after, times),
        )
        changes["parameters"] = tuple(_frozen(one, times) for one in unit.parameters)
    return unit.model_copy(update=changes)


def _frozen(size: S, times: int) -> S:
    return size.model_copy(update={"frozen_bytes": _enlarged_bytes(size, times)})


def _enlarged_bytes(size: UnitKind | RootUnit | EndParameters | RootParameter, times: int) -> int:
    """Return the bytes of frozen parameters in a wider dtype; packed ones stay as they are."""
    return (size.frozen_bytes - size.packed_bytes) * times + size.packed_bytes


def _with_links(cluster: Cluster, new: Card) -> Network | None:
    """Return the stated links plus a new card's links inside hosts: to equal cards, and to cards in
    the catalogue. Measured collectives are kept, because nothing better is known."""
    if cluster.network is None:
        return None
    others = [(c.name, find_class_card(c)) for c in cluster.classes]
    known = {name: card for name, card in others if card is not None}
    links = (
        link for link in make_links_inside(known | {new.name: new}) if new.name in link.classes
    )
    return cluster.network.model_copy(update={"exceptions": (*cluster.network.exceptions, *links)})


def _own_links(cluster: Cluster, between: Link) -> Network:
    """Return the cards' own links inside hosts, if the catalogue knows all cards."""
    cards = {c.name: find_class_card(c) for c in cluster.classes}
    known = {name: card for name, card in cards.items() if card is not None}
    if len(known) < len(cards):
        return Network(inside=between, between=between)
    return Network(between=between, exceptions=make_links_inside(known))


def _compute_correction(profile: Profile) -> float:
    """Return the ratio of measured to estimated times as a geometric mean; 1 if no measured card is
    in the catalogue."""
    ratios = []
    for measured in profile.classes:
        card = find_class_card(profile.cluster.class_named(measured.device_class))
        if measured.estimated or card is None:
            continue
        name = measured.device_class
        expected = estimate_class(card, profile.model_of(name), name)
        found = _seconds(profile, measured, measured)
        if found > 0:
            ratios.append(log(found / _seconds(profile, expected, measured)))
    return exp(sum(ratios) / len(ratios)) if ratios else 1.0


def _seconds(profile: Profile, of: ClassProfile, measured: ClassProfile) -> float:
    """Return the seconds of all calls for a sample, at the largest measured micro-batch."""
    total = 0.0
    for kind, count in Counter(profile.model.kind_of_call).items():
        size = measured.units[kind].forward.sizes[-1]
        for curve in (of.units[kind].forward, of.units[kind].backward):
            total += count * float(interpolate_seconds(curve, size)) / size
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
