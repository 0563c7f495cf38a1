"""Samplers with equal random orders on all ranks, equal to the orders of a single process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler

from gpumix.engine.comm.process_groups import get_group_device
from gpumix.integrations.common.plan_and_shard import get_rank, get_world_size


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
        torch.set_rng_state(_broadcast_from_first(own))
        indices = iter(self._sampler)
        first = list(islice(indices, 1))
        if get_rank() > 0:
            torch.set_rng_state(own)
        yield from chain(first, indices)


class FullBatchSampler(Sampler[Any]):
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


def share_order(sampler: Any) -> Any:
    """Return a sampler with one order on all ranks: wrapped, if neither a generator nor epochs
    determine its order."""
    draws = hasattr(sampler, "generator") and sampler.generator is None
    draws = draws and not hasattr(sampler, "set_epoch")
    return SharedRandomSampler(sampler) if draws else sampler


def scale_length_grouping(sampler: Any) -> Any:
    """Return the sampler; adapt transformers' grouping by length from the batches of a process to
    global batches."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if isinstance(sampler, LengthGroupedSampler):
        sampler.batch_size *= get_world_size()
    return sampler


def prepare_sampler(sampler: Any, *, seedable: bool, seed: int | None) -> Any:
    """Prepare a sampler as Accelerate does: a random sampler becomes seeded, with a new order for
    each epoch, if `seedable`. Without a seed the initial seed of the process applies, assumed equal
    on all ranks."""
    from accelerate.data_loader import SeedableRandomSampler

    if not seedable or type(sampler) is not RandomSampler:
        return share_order(sampler)
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=seed,
    )


def get_shared_seed() -> int:
    """Return the seed of the first rank's generator. Collective."""
    return int(_broadcast_from_first(torch.tensor(torch.initial_seed() % 2**63)))


def _broadcast_from_first(own: Tensor) -> Tensor:
    """Return the first rank's value, on the host. Collective."""
    if get_world_size() == 1:
        return own
    there = own.to(get_group_device(), copy=True)
    dist.broadcast(there, 0)
    return there.cpu()
