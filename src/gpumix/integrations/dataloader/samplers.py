"""Samplers with equal random orders on all ranks, equal to the orders of a single process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler

from gpumix.engine.comm.process_groups import device_of_group
from gpumix.integrations.common.plan_and_shard import rank, world


class SharedRandomSampler(Sampler[Any]):
    """Sampler drawing from the process's random numbers, on all ranks from the first rank's.

    The first rank draws as it would alone; generators of other ranks are left unchanged.

    Args:
        sampler: draws when its first index is requested.
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


class FullBatches(Sampler[Any]):
    """A sampler's indices without a partial batch at the end.

    Args:
        batch: samples of a batch.
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
    """Return a sampler with one order on all ranks: wrapped, if neither a generator nor epochs
    determine its order."""
    draws = hasattr(sampler, "generator") and sampler.generator is None
    draws = draws and not hasattr(sampler, "set_epoch")
    return SharedRandomSampler(sampler) if draws else sampler


def grouped(sampler: Any) -> Any:
    """Return the sampler; adapt transformers' grouping by length from the batches of a process to
    global batches."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if isinstance(sampler, LengthGroupedSampler):
        sampler.batch_size *= world()
    return sampler


def prepared(sampler: Any, *, seedable: bool, seed: int | None) -> Any:
    """Prepare a sampler as Accelerate does: a random sampler becomes seeded, with a new order for
    each epoch, if `seedable`. Without a seed the initial seed of the process applies, assumed equal
    on all ranks."""
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
    """Return the seed of the first rank's generator. Collective."""
    return int(_first_ranks(torch.tensor(torch.initial_seed() % 2**63)))


def _first_ranks(own: Tensor) -> Tensor:
    """Return the first rank's value, on the host. Collective."""
    if world() == 1:
        return own
    there = own.to(device_of_group(), copy=True)
    dist.broadcast(there, 0)
    return there.cpu()
