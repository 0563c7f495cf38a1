"""Splits of a global batch over the groups of a one-stage plan, in one wave or in several. Pure.

In several waves ranks wait for one another in each wave. A step therefore takes as long as the
slowest group of each wave, added up, and each group's samples are spread over all waves as evenly
as whole micro-batches allow. The number of waves stays; micro-batches become no larger than in the
plan, for which there is memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Worker
from gpumix.train.elastic.device_pace import DevicePace, slowest_s, split_samples, with_samples_in


@dataclass(frozen=True)
class SampleDealer:
    """The ways to split the samples of a one-stage plan.

    Attributes:
        leaders: the first worker of each tensor-parallel group in the plan.
    """

    leaders: tuple[Worker, ...]
    waves: int

    @classmethod
    def of(cls, plan: Plan) -> SampleDealer:
        (stage,) = plan.stages
        return cls(stage.leaders, plan.waves)

    def find_splits(
        self,
        total: int,
        paces: Sequence[DevicePace],
        most: Sequence[int],
        least: Sequence[int] | None = None,
    ) -> list[tuple[int, ...]]:
        """Return splits of `total` samples to choose from, the fastest first; see `split_samples`.
        Of one wave the first is optimal; of several waves it is up to samples left over when all
        waves are alike."""
        found = {split_samples(total, paces, most, least)}
        if self.waves > 1:
            found.add(self._split_alike_waves(total, paces, most, least))
        whole = [samples for samples in found if samples is not None and self._fills(samples)]
        return sorted(whole, key=lambda samples: (self.step_s(paces, samples), samples))

    def step_s(self, paces: Sequence[DevicePace], samples: Sequence[int]) -> float:
        """Return the time of the slowest group of each wave, added up."""
        if self.waves == 1:
            return slowest_s(paces, samples)
        waves = [self._divide(group, count) for group, count in enumerate(samples)]
        *others, last = zip(*waves, strict=True)
        working = [DevicePace(0.0, pace.sample_s) for pace in paces]
        return sum(slowest_s(working, wave) for wave in others) + slowest_s(paces, last)

    def apply(self, plan: Plan, samples: Sequence[int]) -> Plan:
        """Return the plan with new samples per group, without a prediction."""
        if self.waves == 1:
            return with_samples_in(plan, [samples])
        (stage,) = plan.stages
        workers = tuple(
            worker.model_copy(
                update={"samples": count, "micro_batch": self._size_micro_batches(group, count)}
            )
            for group, (count, members) in enumerate(zip(samples, stage.tp_groups, strict=True))
            for worker in members
        )
        stages = (stage.model_copy(update={"workers": workers}),)
        return plan.model_copy(update={"stages": stages, "prediction": None, "reasons": None})

    def _split_alike_waves(
        self,
        total: int,
        paces: Sequence[DevicePace],
        most: Sequence[int],
        least: Sequence[int] | None,
    ) -> tuple[int, ...] | None:
        """Split by the samples of a wave: a sample more in each wave goes where a wave with it ends
        first."""
        few = [1] * len(most) if least is None else least
        samples = [min(one, limit) for one, limit in zip(few, most)]
        if sum(most) < total or sum(samples) > total:
            return None
        a_wave = [0] * len(most)
        ends = [(pace.sample_s, group) for group, pace in enumerate(paces) if most[group]]
        heapq.heapify(ends)
        left = total - sum(samples)
        while left:
            _, group = heapq.heappop(ends)
            a_wave[group] += 1
            count = min(max(samples[group], self.waves * a_wave[group]), most[group])
            more = min(left, count - samples[group])
            samples[group] += more
            left -= more
            if samples[group] < most[group]:
                heapq.heappush(ends, (paces[group].sample_s * (a_wave[group] + 1), group))
        return tuple(samples)

    def _fills(self, samples: Sequence[int]) -> bool:
        """Return True if some group has a micro-batch for each wave."""
        sizes = [self._size_micro_batches(group, count) for group, count in enumerate(samples)]
        return any(-(-count // size) >= self.waves for count, size in zip(samples, sizes) if size)

    def _divide(self, group: int, samples: int) -> tuple[int, ...]:
        """Return the samples of a group in each wave."""
        size = self._size_micro_batches(group, samples)
        return _count_in_waves(samples, size, self.waves)

    def _size_micro_batches(self, group: int, samples: int) -> int:
        """Return the size of a group's micro-batches, up to the plan's; of a group without samples
        in the plan up to the largest."""
        planned = self.leaders[group]
        if samples == planned.samples:
            return planned.micro_batch
        most = planned.micro_batch or max(leader.micro_batch for leader in self.leaders)
        return _choose_size(samples, most, self.waves)


def with_samples(plan: Plan, samples: Sequence[int]) -> Plan:
    """Return a plan of one stage with new samples per group, without a prediction."""
    return SampleDealer.of(plan).apply(plan, samples)


@lru_cache(maxsize=4096)
def _count_in_waves(samples: int, size: int, waves: int) -> tuple[int, ...]:
    """Return the samples in each wave, with micro-batches of `size`: see
    `Worker.divide_micro_batches`."""
    count = -(-samples // size) if samples else 0
    ends = [min(samples, size * (count * wave // waves)) for wave in range(waves + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


@lru_cache(maxsize=4096)
def _choose_size(samples: int, most: int, waves: int) -> int:
    """Return the size of micro-batches with the fewest samples in the fullest wave, the largest of
    these; each wave has some, if there are so many samples."""
    if samples == 0:
        return 0
    in_wave = -(-samples // waves)
    even = -(-in_wave // -(-in_wave // most))
    sizes = range(max(1, even // 2), min(most, samples) + 1)
    filling = [size for size in sizes if -(-samples // size) >= min(samples, waves)]
    return min(filling, key=lambda size: (max(_count_in_waves(samples, size, waves)), -size))
