"""Random orders that are the same on all ranks, and those of a single process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler, Sampler

from gpumix.engine.groups import device_of_group
from gpumix.integrations.hosted import world


class Alike(Sampler[int]):
    """A random sampler without a generator: it draws a seed whenever it is read, as it would
    alone, and all ranks take the first one's.

    Args:
        sampler: what is read so.
    """

    def __init__(self, sampler: RandomSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        seed = torch.empty((), dtype=torch.int64).random_()
        if world() > 1:
            there = seed.to(device_of_group())
            dist.broadcast(there, 0)
            seed = there.cpu()
        generator = torch.Generator()
        generator.manual_seed(int(seed))
        again = RandomSampler(
            self._sampler.data_source,
            replacement=self._sampler.replacement,
            num_samples=self._sampler._num_samples,
            generator=generator,
        )
        yield from again


def seeded(sampler: Any, seed: int | None) -> Any:
    """A random sampler as Accelerate makes it for transformers: another order for each epoch, by a
    seed. Others are as they are."""
    from accelerate.data_loader import SeedableRandomSampler

    if type(sampler) is not RandomSampler:
        return sampler
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=seed,
    )
