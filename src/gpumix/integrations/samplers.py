"""Random orders that are the same on all ranks, and those of a single process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler

from gpumix.engine.groups import device_of_group
from gpumix.integrations.hosted import rank, world


class Alike(Sampler[Any]):
    """A sampler that draws from its process's numbers, on all ranks from the first one's. There it
    draws what it would alone; the numbers of others are as if it had not been read.

    Args:
        sampler: draws when its first index is asked for.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        own = torch.get_rng_state()
        torch.set_rng_state(_first_ranks(own))
        indices = iter(self._sampler)
        first = list(islice(indices, 1))
        if rank() > 0:
            torch.set_rng_state(own)
        yield from chain(first, indices)


class Whole(Sampler[Any]):
    """A sampler's indices, but for those at the end that fill no whole batch.

    Args:
        batch: how many are one.
    """

    def __init__(self, sampler: Any, batch: int) -> None:
        self._sampler = sampler
        self._batch = batch

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler) // self._batch * self._batch

    def __iter__(self) -> Iterator[Any]:
        return islice(self._sampler, len(self))


def alike(sampler: Any) -> Any:
    """The same sampler, and if it has neither a generator nor epochs that tell its order, the same
    order on all ranks."""
    draws = hasattr(sampler, "generator") and sampler.generator is None
    draws = draws and not hasattr(sampler, "set_epoch")
    return Alike(sampler) if draws else sampler


def grouped(sampler: Any) -> Any:
    """The same sampler; one of transformers that puts samples of like lengths together, made for
    the batches of one process, does so for those of all."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if isinstance(sampler, LengthGroupedSampler):
        sampler.batch_size *= world()
    return sampler


def prepared(sampler: Any, *, seedable: bool, seed: int | None) -> Any:
    """As Accelerate prepares it: a random one by a seed, another order for each epoch, if it is to
    be so. Without a seed by the one that this process was given, which is then that of all."""
    from accelerate.data_loader import SeedableRandomSampler

    if not seedable or type(sampler) is not RandomSampler:
        return alike(sampler)
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=seed,
    )


def seed_of_all() -> int:
    """What the first rank was seeded with. Collective."""
    return int(_first_ranks(torch.tensor(torch.initial_seed() % 2**63)))


def _first_ranks(own: Tensor) -> Tensor:
    """What the first rank has, on the host. Collective."""
    if world() == 1:
        return own
    there = own.to(device_of_group(), copy=True)
    dist.broadcast(there, 0)
    return there.cpu()
