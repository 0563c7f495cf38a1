"""One way to divide the state and to move it: what a search runs in.

In a setting all times of collectives are known, so devices are bound to each other only by the
batch and the state. The state is divided within *pools*: all devices, or those of each host. Pools
that are alike are counted, and so are the devices of one class in a pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from gpumix.cost.memory import MemoryModel
from gpumix.cost.network import Layout, Links, links_for
from gpumix.cost.time import can
from gpumix.cost.wire import Wire, forms_for, wire_for
from gpumix.spec.cluster import Device
from gpumix.spec.plan import PLAIN, Collectives, Mode, Sharding, ZeroStage
from gpumix.spec.profile import Profile, RankGroup
from gpumix.spec.space import Space

# How long padded intervals may be, against equal ones. Per-owner collectives cost a quarter more
# than native ones (`cost.wire`), so padding by more than that hardly ever pays.
PADDINGS = (1.0, 1.05, 1.1, 1.15, 1.2)


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
class Setting:
    """A profile over chosen devices, with a ZeRO stage, pools, and collectives.

    `cap` is the largest share that a device may store, times the devices of its pool: 1 where all
    store as much and native collectives serve, infinite where each owner sends its own.
    """

    profile: Profile
    devices: tuple[Device, ...]
    zero_stage: ZeroStage
    sharding: Sharding
    collectives: Collectives
    cap: float
    links: Links
    memory: MemoryModel
    modes: tuple[Mode, ...] = (PLAIN,)

    @cached_property
    def classes(self) -> dict[str, tuple[Device, ...]]:
        """The devices of each class by id, the classes by name."""
        found: dict[str, list[Device]] = {}
        for device in sorted(self.devices, key=lambda d: d.id):
            found.setdefault(device.device_class, []).append(device)
        return {name: tuple(found[name]) for name in sorted(found)}

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of each kind, the kinds by the names of their classes."""
        if self.sharding == "all":
            return (Pool(tuple((name, (ds,)) for name, ds in self.classes.items())),)
        return pools_by_host(self.devices)

    @property
    def equal_shares(self) -> bool:
        return self.cap == 1.0

    def largest_micro_batch(self, name: str, samples: int) -> int:
        """The largest micro-batch that class `name` may run of so many samples."""
        limit = self.profile.of_class(name).largest_micro_batch
        return samples if limit is None else min(samples, limit)

    def modes_of(self, name: str) -> tuple[Mode, ...]:
        """What was measured of class `name`."""
        return tuple(mode for mode in self.modes if can(self.profile, name, mode))


def pools_by_host(devices: tuple[Device, ...]) -> tuple[Pool, ...]:
    """One pool a host; hosts with as many devices of each class are alike."""
    on_host: dict[str, dict[str, list[Device]]] = {}
    for device in sorted(devices, key=lambda d: (d.host, d.device_class, d.id)):
        on_host.setdefault(device.host, {}).setdefault(device.device_class, []).append(device)
    kinds: dict[tuple[tuple[str, int], ...], list[dict[str, list[Device]]]] = {}
    for classes in on_host.values():
        kinds.setdefault(tuple((n, len(ds)) for n, ds in classes.items()), []).append(classes)
    return tuple(
        Pool(tuple((name, tuple(tuple(host[name]) for host in hosts)) for name, _ in kind))
        for kind, hosts in sorted(kinds.items())
    )


def settings(profile: Profile, devices: tuple[Device, ...], space: Space) -> Iterator[Setting]:
    """All settings of a space over `devices`, those first that need the least memory."""
    wire = wire_for(profile, devices)
    for zero_stage in sorted(set(space.zero_stages), reverse=True):
        for sharding in space.shardings:
            if sharding == "all" or _worth_a_pool(wire, devices, zero_stage):
                yield from _forms(profile, devices, space, wire, zero_stage, sharding)


def _worth_a_pool(wire: Wire, devices: tuple[Device, ...], zero_stage: ZeroStage) -> bool:
    """Whether hosts may divide the state each for itself: there are several, some with several
    devices, and their links are known."""
    hosts = Counter(d.host for d in devices)
    if zero_stage == 0 or len(hosts) == 1 or max(hosts.values()) == 1:
        return False
    return wire.knows("reduce", "native", "across")


def _forms(
    profile: Profile,
    devices: tuple[Device, ...],
    space: Space,
    wire: Wire,
    zero_stage: ZeroStage,
    sharding: Sharding,
) -> Iterator[Setting]:
    named = forms_for(profile, wire)
    group: RankGroup = "inside" if sharding == "host" else "all"
    native = all(wire.knows(op, "native", group) for op in ("gather", "reduce"))
    choices = [(float("inf"), named)]
    if native or any(wire.knows(op, "native", group) for op in ("gather", "reduce")):
        choices.append((1.0, named))
    if zero_stage == 0:
        choices = [(1.0, named)]  # nothing is divided; what all need to know is cut evenly
    elif native and space.padded:
        choices += [
            (cap, Collectives(gather="padded", reduce="padded", padding=cap)) for cap in PADDINGS
        ]
    for cap, collectives in choices:
        yield setting_of(
            profile,
            devices,
            zero_stage=zero_stage,
            sharding=sharding,
            collectives=collectives,
            cap=cap,
            modes=tuple(space.modes(zero_stage)),
        )


def setting_of(
    profile: Profile,
    devices: tuple[Device, ...],
    *,
    zero_stage: ZeroStage = 3,
    sharding: Sharding = "all",
    collectives: Collectives | None = None,
    cap: float = float("inf"),
    modes: tuple[Mode, ...] = (PLAIN,),
) -> Setting:
    """One setting; without `collectives` by the forms that serve unequal intervals best."""
    wire = wire_for(profile, devices)
    collectives = collectives or forms_for(profile, wire)
    ranks = len(devices)
    if sharding == "host":
        ranks = max(Counter(d.host for d in devices).values())
    layout = Layout(zero_stage, sharding, collectives, _typical_shares(ranks, cap))
    links = links_for(profile, wire, layout)
    return Setting(
        profile=profile,
        devices=devices,
        zero_stage=zero_stage,
        sharding=sharding,
        collectives=collectives,
        cap=cap,
        links=links,
        memory=MemoryModel(profile, links, ranks, zero_stage),
        modes=modes,
    )


def _typical_shares(ranks: int, cap: float) -> tuple[float, ...]:
    """Shares that cost what all shares of a setting cost at most."""
    if cap == 1.0 or ranks == 1:
        return (1.0 / ranks,) * ranks
    if cap >= ranks:
        return (1.0, *(0.0,) * (ranks - 1))
    longest = cap / ranks
    return (longest, *((1.0 - longest) / (ranks - 1),) * (ranks - 1))
