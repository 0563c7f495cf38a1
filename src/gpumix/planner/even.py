"""The plan that ignores differences: equal batches, equal shares, one micro-batch for all.

This is what DDP, FSDP and DeepSpeed do. The micro-batch is the largest that fits on the device with
the least room.
"""

from __future__ import annotations

import numpy as np

from gpumix.cost.curves import IntArray, MicroBatches
from gpumix.cost.memory import Owned, free_bytes, owned_by_rank, usable_bytes
from gpumix.planner.base import Part, PlanRequest, Setting, assemble, ranked_devices
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.spec.units import show_bytes


def even(profile: Profile, request: PlanRequest) -> Plan:
    """Equal batches and shares; a remainder of the batch goes to the first ranks, one sample each.

    Raises:
        InputError: there are fewer samples than devices, or the profile lacks a device.
        NoFeasiblePlanError: a device cannot hold its part even at micro-batches of one sample.
    """
    devices = ranked_devices(profile, request)
    setting = Setting.of(profile, devices, equal_shares=True)
    ranks, batch = len(devices), request.global_batch
    if batch < ranks:
        raise InputError(
            f"a global batch of {batch} cannot be split evenly over {ranks} devices",
            fix=f"set `global_batch` to {ranks} or more, or use `strategy: optimal`",
        )
    each, rest = divmod(batch, ranks)
    samples = [each + (rank < rest) for rank in range(ranks)]
    micro_batch = _largest_micro_batch(setting, samples)
    return assemble(
        setting,
        strategy="even",
        global_batch=batch,
        parts={
            device.id: Part(count, min(micro_batch, count), 1.0 / ranks)
            for device, count in zip(devices, samples)
        },
    )


def _largest_micro_batch(setting: Setting, samples: list[int]) -> int:
    """The largest micro-batch that every device runs within its memory."""
    most = min(setting.largest_micro_batch(name, max(samples)) for name in setting.classes)
    sizes = np.arange(1, most + 1)
    fits = np.ones(most, dtype=bool)
    shares = (1.0 / len(samples),) * len(samples)
    owned = owned_by_rank(setting.profile.model, shares)
    worst: dict[str, int] = {}
    for rank, name, count in _distinct(setting, samples, owned):
        over = _excess(setting, name, owned[rank], count, sizes)
        fits &= over <= 0
        worst[name] = max(worst.get(name, 0), int(over.min()))
    if fits.any():
        return int(sizes[fits].max())
    raise _too_large(setting, worst)


def _distinct(
    setting: Setting, samples: list[int], owned: tuple[Owned, ...]
) -> list[tuple[int, str, int]]:
    """One rank, with its class and samples, for all that hold the same."""
    found: dict[tuple[object, ...], tuple[int, str, int]] = {}
    for rank, (device, count, own) in enumerate(zip(setting.devices, samples, owned)):
        key = (device.device_class, count, tuple(own.elements.items()), own.frozen_bytes)
        found.setdefault(key, (rank, device.device_class, count))
    return list(found.values())


def _excess(setting: Setting, name: str, owned: Owned, samples: int, sizes: IntArray) -> IntArray:
    """Bytes by which a device of class `name` exceeds its memory, for each micro-batch size."""
    micro = MicroBatches.of(np.full(len(sizes), samples), sizes)
    peaks = setting.memory.peaks(micro, [owned] * len(sizes))
    return np.asarray([sum(p.values()) for p in peaks]) - free_bytes(setting.profile, name)


def _too_large(setting: Setting, worst: dict[str, int]) -> NoFeasiblePlanError:
    short = {name: over for name, over in worst.items() if over > 0}
    if not short:
        return NoFeasiblePlanError(
            "an even plan does not fit: no one micro-batch fits all devices",
            fix="use `strategy: optimal`, which gives each device its own",
        )
    cluster = setting.profile.cluster
    name = max(short, key=lambda n: (short[n], n))
    each = "; ".join(
        f"{n} is short of {over} bytes ({show_bytes(over)}) of the "
        f"{show_bytes(usable_bytes(cluster.class_named(n)))} it can use"
        for n, over in sorted(short.items())
    )
    return NoFeasiblePlanError(
        f"an even plan does not fit: device class '{name}' is short of {short[name]} bytes",
        why=f"{each}, at the best micro-batch and with a {len(setting.devices)}th of the state",
        fix="use `strategy: optimal`, which gives devices with less memory less of it",
    )
