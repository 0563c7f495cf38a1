"""The plan ignoring differences: equal batches, equal shares, one micro-batch size for all.

DDP, FSDP and DeepSpeed divide work this way. The micro-batch is the largest that fits on the device
with the least room; of the allowed ZeRO stages and modes, the fastest is used for all devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpumix.cost.memory_layout.curves import IntArray, MicroBatches
from gpumix.cost.network.buckets import Buckets
from gpumix.cost.peak_memory import Activations, OwnedState, compute_free_bytes, compute_owned_state
from gpumix.planner.common.policy_shortage import Shortage, make_policy_error
from gpumix.planner.common.score import (
    DeviceLoad,
    compute_host_excess_bytes,
    iterate_even_settings,
    predict_load_step_seconds,
)
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.planner.common.strategy import DevicePart, PlanRequest, build_plan, list_devices_by_rank
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import InputError
from gpumix.schema.plan.optimizer_state import get_cut_multiple
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile


def plan_even(profile: Profile, request: PlanRequest) -> Plan:
    """Plan equal batches and shares; the first ranks get one sample more for a remainder.

    Raises:
        InputError: there are fewer samples than devices, or the profile lacks a device.
        NoFeasiblePlanError: a device cannot hold its part even at micro-batches of one sample.
    """
    return next(iterate_even_plans(profile, request))


def iterate_even_plans(profile: Profile, request: PlanRequest) -> Iterator[Plan]:
    """Yield the even plan of each ZeRO stage and mode that fits, the fastest first by prediction.

    Raises:
        InputError, NoFeasiblePlanError: as `even`.
    """
    devices = list_devices_by_rank(profile, request)
    ranks, batch = len(devices), request.global_batch
    if batch < ranks:
        raise InputError(
            f"a global batch of {batch} cannot be split evenly over {ranks} devices",
            code="batch-not-even",
            fix=f"set `global_batch_size` to {ranks} or more, or use `strategy: optimal`",
        )
    each, rest = divmod(batch, ranks)
    samples = [each + (rank < rest) for rank in range(ranks)]
    ways = list(iterate_even_settings(profile, devices, request.space))
    multiple = get_cut_multiple(profile.optimizer_state)
    kinds = _list_device_kinds(ways[0][0].links.buckets, devices, samples, multiple) if ways else []
    tried = [_EvenCandidate.of(setting, mode, kinds) for setting, mode in ways]
    fitting = [way for way in tried if way.micro_batch is not None]
    if not fitting:
        raise make_policy_error("an even plan", ((way.setting, way.excess) for way in tried))
    for way in sorted(fitting, key=lambda way: way.step_s):
        assert way.micro_batch is not None
        yield build_plan(
            way.setting,
            strategy="even",
            global_batch=batch,
            parts={
                device.id: DevicePart(count, min(way.micro_batch, count), 1.0 / ranks, way.mode)
                for device, count in zip(devices, samples)
            },
        )


@dataclass(frozen=True)
class _EvenCandidate:
    """Equal parts in one setting and mode: the largest micro-batch fitting all devices, if any, and
    the bytes each class exceeds its memory by at best."""

    setting: ShardingSetting
    mode: Mode
    micro_batch: int | None
    step_s: float
    excess: dict[str, Shortage]

    @classmethod
    def of(
        cls, setting: ShardingSetting, mode: Mode, kinds: Sequence[_DeviceKind]
    ) -> _EvenCandidate:
        most = max(kind.samples for kind in kinds)
        most = min(setting.largest_micro_batch(name, most) for name in setting.classes)
        sizes = np.arange(1, most + 1)
        fits = np.ones(most, dtype=bool)
        worst: dict[str, Shortage] = {}
        for kind in kinds:
            over, over_host = _compute_excess_bytes(setting, mode, kind, sizes)
            fits &= np.maximum(over, over_host) <= 0
            short = Shortage.least(over, over_host)
            worst[kind.name] = max(worst.get(kind.name, Shortage()), short)
        if not fits.any():
            return cls(setting, mode, None, float("inf"), worst)
        size, share = int(sizes[fits].max()), 1.0 / len(setting.devices)
        loads = {DeviceLoad(k.name, k.samples, min(size, k.samples), share, mode) for k in kinds}
        return cls(setting, mode, size, predict_load_step_seconds(setting, loads), worst)


@dataclass(frozen=True)
class _DeviceKind:
    """Devices of one class with equal numbers of samples and of owned elements."""

    name: str
    samples: int
    owned: OwnedState


def _list_device_kinds(
    buckets: Buckets, devices: Sequence[Device], samples: Sequence[int], multiple: int
) -> list[_DeviceKind]:
    """Return the distinct kinds of devices if all own equally much, to the element; cuts are at
    multiples of `multiple` elements."""
    owned = compute_owned_state(buckets, (1.0 / len(devices),) * len(devices), multiple)
    every = (_DeviceKind(d.device_class, n, own) for d, n, own in zip(devices, samples, owned))
    return list(dict.fromkeys(every))


def _compute_excess_bytes(
    setting: ShardingSetting, mode: Mode, kind: _DeviceKind, sizes: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the bytes over device memory, and over the host's memory, by micro-batch size."""
    micro = MicroBatches.of(np.full(len(sizes), kind.samples), sizes)
    held = Activations(setting.profile.model_of(kind.name), micro, mode)
    peaks = setting.memory.peaks(held, [kind.owned] * len(sizes))
    over = np.asarray([sum(p.values()) for p in peaks]) - compute_free_bytes(
        setting.profile, kind.name
    )
    over_host = compute_host_excess_bytes(setting, kind.name, micro, mode).astype(np.int64)
    return over, over_host
