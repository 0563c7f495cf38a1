"""The counted loads of a policy for the devices of each class, and the resulting plan.

Devices of a class are alike, so a policy says how many of them get which load. Within a class, the
first devices by id get the most samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat

from gpumix.planner.common.score import DeviceLoad, predict_load_step_seconds
from gpumix.planner.common.sharding_setting import ShardingSetting
from gpumix.planner.common.strategy import DevicePart, build_plan
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode

# Pairs of samples and the number of devices with as many, for one class.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ClassSplit:
    """Loads with the number of devices getting each: all devices of `setting`."""

    setting: ShardingSetting
    loads: tuple[tuple[DeviceLoad, int], ...]

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step, by the cost model common to all policies."""
        return predict_load_step_seconds(self.setting, (load for load, _ in self.loads))

    def plan(self, strategy: str) -> Plan:
        """Build the plan giving its loads to the devices of each class by id, the largest first."""
        order = sorted(self.loads, key=lambda pair: (-pair[0].samples, -pair[0].share))
        parts: dict[str, DevicePart] = {}
        for name, devices in self.setting.classes.items():
            of_class = [pair for pair in order if pair[0].device_class == name]
            each = chain.from_iterable(repeat(_make_part(load), count) for load, count in of_class)
            parts |= {device.id: part for device, part in zip(devices, each, strict=True)}
        batch = sum(load.samples * count for load, count in self.loads)
        return build_plan(self.setting, strategy=strategy, global_batch=batch, parts=parts)


def _make_part(load: DeviceLoad) -> DevicePart:
    return DevicePart(load.samples, min(load.micro_batch, load.samples), load.share, load.mode)


def split_with_equal_shares(
    setting: ShardingSetting, mode: Mode, runs: Sequence[Runs], micro_batches: Sequence[int]
) -> ClassSplit:
    """Build a division with given samples and micro-batch sizes by class, and equal state shares.

    The sequences follow `setting.classes`.
    """
    share = 1.0 / len(setting.devices)
    return ClassSplit(
        setting,
        tuple(
            (DeviceLoad(name, samples, size, share, mode), count)
            for name, of_class, size in zip(setting.classes, runs, micro_batches)
            for samples, count in of_class
        ),
    )


def apportion(
    total: int, weights: Sequence[float], most: Sequence[int], counts: Sequence[int]
) -> tuple[Runs, ...] | None:
    """Apportion `total` samples by weight, at most `most` a device; None if devices take fewer.

    Each entry is for a class of `counts` devices. The excess of a class over its `most` goes to the
    other classes. Shares are rounded down, and the rest goes by largest remainder, one sample a
    device; ties go to the first class.
    """
    if sum(m * n for m, n in zip(most, counts)) < total:
        return None
    weights = _make_weights_finite(weights)
    full: set[int] = set()
    while True:
        left = total - sum(most[c] * counts[c] for c in full)
        rest = [c for c in range(len(counts)) if c not in full]
        weight = sum(weights[c] * counts[c] for c in rest)
        if weight == 0 and left > 0:  # classes without weight share the rest evenly
            weights = [1.0 if c in rest else w for c, w in enumerate(weights)]
            continue
        shares = {c: left * weights[c] / weight if weight else 0.0 for c in rest}
        over = {c for c in rest if shares[c] > most[c]}
        if not over:
            break
        full |= over
    return _round_shares(left, shares, most, counts)


def _round_shares(
    left: int, shares: dict[int, float], most: Sequence[int], counts: Sequence[int]
) -> tuple[Runs, ...]:
    each = [int(shares.get(c, most[c])) for c in range(len(counts))]
    left -= sum(each[c] * counts[c] for c in shares)
    more = [0] * len(counts)
    for c in sorted(shares, key=lambda c: (each[c] - shares[c], c)):
        if each[c] < most[c]:
            more[c] = min(left, counts[c])
            left -= more[c]
    assert left == 0, "remainders add up to less than one sample a device"
    return tuple(
        _drop_empty_runs([(each[c] + 1, more[c]), (each[c], counts[c] - more[c])])
        for c in range(len(counts))
    )


def _drop_empty_runs(pairs: Iterable[tuple[int, int]]) -> Runs:
    return tuple((samples, count) for samples, count in pairs if count)


def _make_weights_finite(weights: Sequence[float]) -> list[float]:
    """Return finite weights: next to an infinite weight, finite weights become 0."""
    if float("inf") not in weights:
        return list(weights)
    return [1.0 if w == float("inf") else 0.0 for w in weights]
