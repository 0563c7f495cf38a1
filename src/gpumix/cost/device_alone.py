"""Speed of devices running alone: the upper bound for a mixture of devices.

A device computing without pause needs a fixed time per sample, at its fastest measured micro-batch
and mode. It sends nothing, waits for no rank and does not run out of memory. The sum over devices
is a speed that no plan exceeds without better kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from gpumix.cost.memory_layout.curves import MicroBatches
from gpumix.cost.step_time import can_predict_mode, compute_work_seconds
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import ROOT, Profile

TRIED_MODES = (Mode(), Mode(recompute=False))
TRIED_HEADS = ("whole", "chunked")


def compute_ideal_samples_per_s(profile: Profile, device_class: str) -> float:
    """Return the samples per second of one device of a class."""
    measured = profile.of_class(device_class)
    sizes = sorted({size for one in measured.units.values() for size in one.forward.sizes})
    most = measured.largest_micro_batch or max(measured.units[ROOT].forward.sizes)
    tried = np.unique([max(1, int(size)) for size in sizes if size <= most] or [1])
    micro = MicroBatches.of(tried, tried)
    modes = [one.model_copy(update={"head": head}) for one in TRIED_MODES for head in TRIED_HEADS]
    seconds = [
        compute_work_seconds(profile, device_class, micro, mode) / tried
        for mode in modes
        if can_predict_mode(profile, device_class, mode)
    ]
    least_s = float(np.min(seconds))
    return 1.0 / least_s if least_s > 0 else float("inf")


def compute_ideal_tokens_per_s(profile: Profile, device_classes: Iterable[str]) -> float:
    """Return the tokens per second of devices running alone; list a class once per device."""
    counts = Counter(device_classes)
    samples_per_s = sum(
        n * compute_ideal_samples_per_s(profile, name) for name, n in counts.items()
    )
    return samples_per_s * profile.sequence_length
