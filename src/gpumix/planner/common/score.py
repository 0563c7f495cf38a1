"""Time and memory of a policy's candidates, before any candidate becomes a plan.

Policies decide by their own rules. The time and memory of these decisions are counted here, with
one cost model for all, once per class and amount of work and not per device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gpumix.cost.loading_memory import find_room_on_host
from gpumix.cost.memory_layout.curves import FloatArray, MicroBatches
from gpumix.cost.peak_memory import Activations
from gpumix.cost.step_time import compute_pass_seconds, needs_sync_between_passes
from gpumix.planner.common.sharding_setting import ShardingSetting, make_setting
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import ZeroStage
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile


@dataclass(frozen=True)
class DeviceLoad:
    """The work and state of devices of one class."""

    device_class: str
    samples: int
    micro_batch: int
    share: float
    mode: Mode


def predict_load_step_seconds(setting: ShardingSetting, loads: Iterable[DeviceLoad]) -> float:
    """Return seconds of a step in which every device has one of `loads`."""
    forward, backward, both, update = 0.0, 0.0, 0.0, 0.0
    for load in set(loads):
        micro = MicroBatches.of([load.samples], [load.micro_batch])
        f, b = compute_pass_seconds(
            setting.profile, load.device_class, setting.links, micro, load.mode
        )
        forward, backward = max(forward, float(f[0])), max(backward, float(b[0]))
        both = max(both, float(f[0] + b[0]))
        whole = setting.update_s(load.device_class)
        update = max(update, whole * (load.share if setting.zero_stage else 1.0))
    passes = forward + backward if needs_sync_between_passes(setting.zero_stage) else both
    return setting.exposed_s + passes + update


def compute_share_capacities(
    setting: ShardingSetting, name: str, micro: MicroBatches, mode: Mode
) -> FloatArray:
    """Return the largest share with room on a device of class `name` next to each of `micro`; -1 if
    the device or its host has no room at all."""
    return setting.room(name, Activations(setting.profile.model_of(name), micro, mode))


def compute_peak_bytes(
    setting: ShardingSetting, name: str, micro: MicroBatches, mode: Mode, share: float
) -> FloatArray:
    """Return bytes of each of `micro` on a device of class `name` with a share of the state,
    without the framework."""
    demands = setting.memory.demands(Activations(setting.profile.model_of(name), micro, mode))
    if setting.zero_stage == 0:
        return np.asarray(demands.fixed_bytes)
    held = demands.fixed_bytes + demands.rounding + share * demands.per_share
    return np.asarray(held)


def compute_host_excess_bytes(
    setting: ShardingSetting, name: str, micro: MicroBatches, mode: Mode
) -> FloatArray:
    """Return bytes of each of `micro` beyond the host memory for a device of class `name`."""
    most = find_room_on_host(setting.profile, name)
    if mode.boundary == "device" or most is None:
        return np.zeros(micro.size.shape)
    held = Activations(setting.profile.model_of(name), micro, mode)
    return np.asarray(np.maximum(held.on_host - most, 0.0))


def iterate_even_settings(
    profile: Profile, devices: tuple[Device, ...], space: Space
) -> Iterator[tuple[ShardingSetting, Mode]]:
    """Yield settings of equal shares at every ZeRO stage, with one mode for all devices."""
    for zero_stage in sorted(set(space.zero_stages), reverse=True):
        yield from iterate_even_settings_at(profile, devices, space, zero_stage)


def iterate_even_settings_at(
    profile: Profile, devices: tuple[Device, ...], space: Space, zero_stage: ZeroStage
) -> Iterator[tuple[ShardingSetting, Mode]]:
    """Yield settings of equal shares at a single ZeRO stage; see `iterate_even_settings`."""
    modes = tuple(space.modes(zero_stage))
    setting = make_setting(profile, devices, zero_stage=zero_stage, cap=1.0, modes=modes)
    for mode in modes:
        if all(mode in setting.modes[name] for name in setting.classes):
            yield setting, mode
