"""The plan that ignores differences: equal batches, equal shares, one micro-batch for all.

This is what DDP, FSDP and DeepSpeed do. The micro-batch is the largest that fits on the device with
the least room; of the ZeRO stages and modes that are allowed the fastest is taken, the same for all
devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpumix.cost.curves import IntArray, MicroBatches
from gpumix.cost.memory import Activations, Owned, free_bytes, owned_by_rank
from gpumix.planner.base import Part, PlanRequest, assemble, ranked_devices
from gpumix.planner.misfit import too_large
from gpumix.planner.setting import Setting
from gpumix.planner.weigh import Load, even_settings, host_excess, step_seconds
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Mode, Plan
from gpumix.spec.profile import Profile


def even(profile: Profile, request: PlanRequest) -> Plan:
    """Equal batches and shares; a remainder of the batch goes to the first ranks, one sample each.

    Raises:
        InputError: there are fewer samples than devices, or the profile lacks a device.
        NoFeasiblePlanError: a device cannot hold its part even at micro-batches of one sample.
    """
    devices = ranked_devices(profile, request)
    ranks, batch = len(devices), request.global_batch
    if batch < ranks:
        raise InputError(
            f"a global batch of {batch} cannot be split evenly over {ranks} devices",
            fix=f"set `global_batch` to {ranks} or more, or use `strategy: optimal`",
        )
    each, rest = divmod(batch, ranks)
    samples = [each + (rank < rest) for rank in range(ranks)]
    tried = [
        _Even.of(setting, mode, samples)
        for setting, mode in even_settings(profile, devices, request.space)
    ]
    fitting = [way for way in tried if way.micro_batch is not None]
    if not fitting:
        raise too_large("an even plan", ((way.setting, way.excess) for way in tried))
    best = min(fitting, key=lambda way: way.step_s)
    assert best.micro_batch is not None
    return assemble(
        best.setting,
        strategy="even",
        global_batch=batch,
        parts={
            device.id: Part(count, min(best.micro_batch, count), 1.0 / ranks, best.mode)
            for device, count in zip(devices, samples)
        },
    )


@dataclass(frozen=True)
class _Even:
    """Equal parts in one setting and mode: the largest micro-batch that fits all, if there is one,
    and by how many bytes the best one of each class exceeds its memory."""

    setting: Setting
    mode: Mode
    micro_batch: int | None
    step_s: float
    excess: dict[str, int]

    @classmethod
    def of(cls, setting: Setting, mode: Mode, samples: list[int]) -> _Even:
        most = min(setting.largest_micro_batch(name, max(samples)) for name in setting.classes)
        sizes = np.arange(1, most + 1)
        fits = np.ones(most, dtype=bool)
        share = 1.0 / len(samples)
        owned = owned_by_rank(setting.profile.model, (share,) * len(samples))
        worst: dict[str, int] = {}
        distinct = _distinct(setting, samples, owned)
        for rank, name, count in distinct:
            over = _excess(setting, name, mode, owned[rank], count, sizes)
            fits &= over <= 0
            worst[name] = max(worst.get(name, 0), int(over.min()))
        if not fits.any():
            return cls(setting, mode, None, float("inf"), worst)
        size = int(sizes[fits].max())
        loads = {Load(name, n, min(size, n), share, mode) for _, name, n in distinct}
        return cls(setting, mode, size, step_seconds(setting, loads), worst)


def _distinct(
    setting: Setting, samples: list[int], owned: tuple[Owned, ...]
) -> list[tuple[int, str, int]]:
    """One rank, with its class and samples, for all that hold the same."""
    found: dict[tuple[str, int, Owned], int] = {}
    for rank, (device, count, own) in enumerate(zip(setting.devices, samples, owned)):
        found.setdefault((device.device_class, count, own), rank)
    return [(rank, name, count) for (name, count, _), rank in found.items()]


def _excess(
    setting: Setting, name: str, mode: Mode, owned: Owned, samples: int, sizes: IntArray
) -> IntArray:
    """Bytes by which a device of class `name` exceeds its memory, for each micro-batch size."""
    micro = MicroBatches.of(np.full(len(sizes), samples), sizes)
    held = Activations(setting.profile.model, micro, mode)
    peaks = setting.memory.peaks(held, [owned] * len(sizes))
    over = np.asarray([sum(p.values()) for p in peaks]) - free_bytes(setting.profile, name)
    over_host = host_excess(setting, name, micro, mode).astype(np.int64)
    return np.asarray(np.maximum(over, over_host))
