"""Settings of a search: ways to divide and to move the state.

In a setting all times of collectives are known, so only the batch and the state couple devices. The
state is divided within *pools*: all devices, or the devices of each host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import numpy as np

from gpumix.cost.identity import ByIdentity
from gpumix.cost.loading_memory import find_room_on_host
from gpumix.cost.memory_layout.curves import FloatArray
from gpumix.cost.network.buckets import BucketGrouping
from gpumix.cost.network.collective_times import (
    BufferCuts,
    CollectiveSeconds,
    ShardedLayout,
)
from gpumix.cost.network.link_times import Operation, select_collective_forms
from gpumix.cost.peak_memory import Activations, MemoryModel, compute_free_bytes
from gpumix.cost.step_time import (
    can_keep_state_on_host,
    compute_exposed_seconds,
    compute_optimizer_seconds,
)
from gpumix.planner.common.device_pool import Fleet, Pool
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.optimizer_state import get_cut_multiple
from gpumix.schema.plan.plan import Collectives, Sharding, ZeroStage
from gpumix.schema.plan.stage import PLAIN, Mode, Place
from gpumix.schema.profile.profile import Profile, RankGroup

OPERATIONS: tuple[Operation, ...] = ("gather", "reduce")
# Lengths of padded intervals, relative to equal intervals. Per-owner collectives cost a quarter
# more than native collectives (`cost.network.link_times`), so more padding hardly ever pays.
PADDINGS = (1.0, 1.05, 1.1, 1.15, 1.2)


@dataclass(frozen=True)
class ShardingSetting:
    """A fleet with a ZeRO stage, pools, and collectives.

    `cap` is the largest share of a device, times the devices of its pool: 1 for equal shares with
    native collectives, infinite if each owner sends its own. `modes` has the measured modes of each
    class. Classes in `on_host` keep their state on the host; in a relaxation, classes in
    `on_either` have the room of both places, and the update time of the faster.
    """

    fleet: Fleet
    zero_stage: ZeroStage
    sharding: Sharding
    collectives: Collectives
    cap: float
    joining: BucketGrouping
    links: CollectiveSeconds
    memory: MemoryModel
    modes: Mapping[str, tuple[Mode, ...]]
    on_host: frozenset[str] = frozenset()
    on_either: frozenset[str] = frozenset()

    @property
    def profile(self) -> Profile:
        return self.fleet.profile

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.fleet.devices

    @property
    def classes(self) -> Mapping[str, tuple[Device, ...]]:
        """The devices of each class by id, the classes by name."""
        return self.fleet.classes

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of each kind."""
        return self.fleet.by_host if self.sharding == "host" else self.fleet.whole

    @property
    def equal_shares(self) -> bool:
        return self.cap == 1.0

    def largest_micro_batch(self, name: str, samples: int) -> int:
        """Return the largest micro-batch of class `name` for `samples` samples."""
        limit = self.profile.of_class(name).largest_micro_batch
        return samples if limit is None else min(samples, limit)

    def room(self, name: str, held: Activations) -> FloatArray:
        """Return the largest share with room on a device of class `name` next to each choice; -1 if
        the device or its host has no room at all."""
        host_bytes = find_room_on_host(self.profile, name)
        every = (self.memory.demands(held, state_on=place) for place in self.places(name))
        rooms = (one.capacity(compute_free_bytes(self.profile, name), host_bytes) for one in every)
        capacity = reduce(np.maximum, rooms)
        if self.zero_stage == 0:  # the state is undivided: any room is for all of it
            capacity = np.where(capacity >= 0, 1.0, -1.0)
        return capacity

    @property
    def parameters_on(self) -> Place:
        """Return the place of all parameters; with parameters on hosts, all state is there too."""
        return self.links.parameters_on

    def state_on(self, name: str) -> Place:
        """Return the place where devices of class `name` keep state."""
        (place,) = self.places(name)
        return place

    def places(self, name: str) -> tuple[Place, ...]:
        """Return the places where devices of class `name` may keep state."""
        if name in self.on_either:
            return ("device", "host")
        return ("host",) if name in self.on_host else ("device",)

    @property
    def exposed_s(self) -> float:
        """Return seconds of a wave that computation never hides, whatever the samples."""
        return compute_exposed_seconds(self.profile, self.links, self.fleet.waves)

    def update_s(self, name: str) -> float:
        """Return seconds for a device of class `name` to update the whole model, divided by the
        waves of a step."""
        gathered = self.links.communication_dtype or self.profile.model_of(name).compute_dtype
        least_s = min(
            compute_optimizer_seconds(
                self.profile,
                name,
                self.zero_stage,
                place,
                gathered=gathered,
                parameters_on=self.parameters_on,
            )
            for place in self.places(name)
        )
        return least_s / self.fleet.waves


def iterate_settings(
    fleet: Fleet, space: Space, is_worthwhile: Callable[[ShardingSetting], bool] | None = None
) -> Iterator[ShardingSetting]:
    """Yield all settings of a space, first by least state on hosts, then by least memory; at last
    those with all parameters on hosts.

    Args:
        is_worthwhile: asked of each setting with state in any of the places, before the settings
            of each place are made.
    """
    places = space.parameters_on or ("device",)
    if "device" in places:
        on_devices = list(_iterate_device_settings(fleet, space))
        every = list(iterate_offloaded_classes(fleet, space))
        if is_worthwhile and every:
            on_devices = [one for one in on_devices if is_worthwhile(_relax_places(one, every))]
        for on_host in every:
            yield from (replace(setting, on_host=on_host) for setting in on_devices)
    if "host" in places and can_keep_parameters_on_hosts(fleet, space):
        yield make_setting_on_hosts(fleet, space)


def can_keep_parameters_on_hosts(fleet: Fleet, space: Space) -> bool:
    """Return True if hosts may keep all parameters: their work was measured, several hosts know
    how they sum gradients, and the space allows the state there."""
    measured = all(can_keep_state_on_host(fleet.profile, name) for name in fleet.classes)
    allowed = 3 in space.zero_stages and "host" in space.state_on
    sharding = "host" if len(fleet.per_host) > 1 else "all"
    if not (measured and allowed and sharding in space.shardings):
        return False
    return len(fleet.per_host) == 1 or fleet.link_model.knows("reduce", "native", "across")


def make_setting_on_hosts(fleet: Fleet, space: Space) -> ShardingSetting:
    """Build the setting with all parameters on hosts. Cores of a host are shared equally by its
    devices, so each updates an equal share."""
    sharding: Sharding = "host" if len(fleet.per_host) > 1 else "all"
    layout = _layout(fleet, 3, sharding, select_collective_forms(fleet.profile), 1.0)
    layout = replace(layout, parameters_on="host", classes=tuple(fleet.classes))
    setting = _setting(fleet, layout, 1.0, fleet.measured(tuple(space.modes(3))))
    return replace(setting, on_host=frozenset(fleet.classes))


def _iterate_device_settings(fleet: Fleet, space: Space) -> Iterator[ShardingSetting]:
    for zero_stage in sorted(set(space.zero_stages), reverse=True):
        for sharding in space.shardings:
            if sharding == "all" or _can_shard_per_host(fleet, zero_stage):
                yield from _iterate_collective_forms(fleet, space, zero_stage, sharding)


def iterate_offloaded_classes(fleet: Fleet, space: Space) -> Iterator[frozenset[str]]:
    """Yield sets of classes with state on the host: none, then more, least memory first."""
    profile = fleet.profile
    able = [name for name in fleet.classes if can_keep_state_on_host(profile, name)]
    able.sort(key=lambda name: (compute_free_bytes(profile, name), name))
    for count in range(len(able) + 1) if "host" in space.state_on else [0]:
        if "device" in space.state_on or count == len(fleet.classes):
            yield frozenset(able[:count])


def _can_shard_per_host(fleet: Fleet, zero_stage: ZeroStage) -> bool:
    """Return True if each host may divide the state separately: several hosts, some with several
    devices, and known links."""
    if zero_stage == 0 or len(fleet.per_host) == 1 or max(fleet.per_host) == 1:
        return False
    return fleet.link_model.knows("reduce", "native", "across")


def _iterate_collective_forms(
    fleet: Fleet, space: Space, zero_stage: ZeroStage, sharding: Sharding
) -> Iterator[ShardingSetting]:
    named = select_collective_forms(fleet.profile)
    group: RankGroup = "inside" if sharding == "host" else "all"
    native = [op for op in OPERATIONS if fleet.link_model.knows(op, "native", group)]
    choices = [(float("inf"), named)]
    if native:
        choices.append((1.0, named))
    if zero_stage == 0:
        choices = [(1.0, named)]  # nothing is divided; collectives cut evenly
    elif len(native) == len(OPERATIONS) and space.padded:
        choices += [
            (cap, Collectives(gather="padded", reduce="padded", padding=cap)) for cap in PADDINGS
        ]
    modes = fleet.measured(tuple(space.modes(zero_stage)))
    for cap, collectives in choices:
        yield _setting(
            fleet,
            _layout(fleet, zero_stage, sharding, collectives, cap),
            cap,
            modes,
        )


def make_setting(
    profile: Profile,
    devices: tuple[Device, ...],
    *,
    zero_stage: ZeroStage = 3,
    cap: float = float("inf"),
    modes: tuple[Mode, ...] = (PLAIN,),
) -> ShardingSetting:
    """Build a setting with state sharded over all devices, by the collectives best for unequal
    intervals."""
    fleet = Fleet.of(profile, devices)
    layout = _layout(fleet, zero_stage, "all", select_collective_forms(profile), cap)
    return _setting(fleet, layout, cap, fleet.measured(modes))


def relax_settings(settings: Sequence[ShardingSetting]) -> ShardingSetting:
    """Return a setting in which no plan takes longer, or more memory, than in any of `settings`,
    which differ in their collectives and in the places of state only: with the fastest of all, the
    widest cut, and any of the places."""
    memory = _relax_memory(tuple({ByIdentity(setting.memory): None for setting in settings}))
    cap = max(setting.cap for setting in settings)
    relaxed = replace(settings[0], cap=cap, links=memory.links, memory=memory)
    return _relax_places(relaxed, [setting.on_host for setting in settings])


def _relax_places(setting: ShardingSetting, every: Sequence[frozenset[str]]) -> ShardingSetting:
    """Return a setting in which no plan takes longer than with any set of classes on hosts."""
    always = frozenset.intersection(*every)
    return replace(setting, on_host=always, on_either=frozenset.union(*every) - always)


@lru_cache(maxsize=64)  # settings with state on the hosts of other classes have the same
def _relax_memory(settings: tuple[ByIdentity[MemoryModel], ...]) -> MemoryModel:
    """Return the memory, and the links, of `relax_settings`."""
    one, every = settings[0].value, [of.value.links for of in settings]

    def fastest(of: Callable[[CollectiveSeconds], Mapping[str, float]]) -> dict[str, float]:
        return {name: min(of(links)[name] for links in every) for name in of(every[0])}

    links = replace(
        one.links,
        gather_s=fastest(lambda links: links.gather_s),
        regather_s=fastest(lambda links: links.regather_s),
        reduce_s=fastest(lambda links: links.reduce_s),
        all_to_all=frozenset(),
        padding_bytes=0,
        copied_rows=min(links.copied_rows for links in every),
    )
    return replace(one, links=links)


def _setting(
    fleet: Fleet, layout: ShardedLayout, cap: float, modes: Mapping[str, tuple[Mode, ...]]
) -> ShardingSetting:
    # Stages 1 and 2 differ in memory only.
    alike = replace(layout, zero_stage=2) if layout.zero_stage == 1 else layout
    links = fleet.compute_seconds(alike)
    return ShardingSetting(
        fleet=fleet,
        zero_stage=layout.zero_stage,
        sharding=layout.sharding,
        collectives=layout.collectives,
        cap=cap,
        joining=layout.joining,
        links=links,
        memory=MemoryModel(fleet.profile, links, layout.cuts.ranks, layout.zero_stage),
        modes=modes,
    )


def _layout(
    fleet: Fleet, zero_stage: ZeroStage, sharding: Sharding, collectives: Collectives, cap: float
) -> ShardedLayout:
    """Build a layout; hosts surely cut alike with equally many devices and equal shares."""
    root = fleet.profile.model.root
    return ShardedLayout(
        zero_stage,
        sharding,
        collectives,
        _cuts(fleet, sharding, cap),
        fleet.communication_dtype,
        BucketGrouping(before=bool(root.before.names), after=bool(root.after.names)),
        hosts=len(fleet.per_host),
        alike=cap == 1.0 and len(set(fleet.per_host)) == 1,
    )


def _cuts(fleet: Fleet, sharding: Sharding, cap: float) -> BufferCuts:
    """Return cuts of the highest cost among all shares of a setting, in the largest pool."""
    ranks = max(fleet.per_host) if sharding == "host" else fleet.size
    multiple = get_cut_multiple(fleet.profile.optimizer_state)
    return BufferCuts.alike(ranks, multiple) if cap == 1.0 else BufferCuts.unlike(ranks)
