"""Random orders are the first rank's on all ranks, whatever the others have drawn before."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gpumix.integrations.dataloader.samplers import (
    get_shared_seed,
    prepare_sampler,
    scale_length_grouping,
    share_order,
)
from helpers.processes.harness import run_ranks

NUMBERS = range(20)


def samplers() -> list[Any]:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    return [
        RandomSampler(NUMBERS),
        RandomSampler(NUMBERS, replacement=True, num_samples=70),
        SubsetRandomSampler(NUMBERS),
        WeightedRandomSampler([1.0, 2.0, 3.0], 30),
        LengthGroupedSampler(4, lengths=list(NUMBERS)),
    ]


def test_ranks_read_what_the_first_one_reads_alone():
    torch.manual_seed(0)
    alone = [[list(sampler) for _ in range(2)] for sampler in samplers()]
    first, other = run_ranks(_read, 2)
    assert first["orders"] == other["orders"] == alone
    assert first["then"] == torch.rand(1).item()
    assert other["then"] == other["undisturbed"]


def _read() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    undisturbed = torch.rand(1).item()
    torch.manual_seed(rank)
    orders = [[list(read) for _ in range(2)] for read in map(share_order, samplers())]
    return {"orders": orders, "then": torch.rand(1).item(), "undisturbed": undisturbed}


def test_samples_of_like_lengths_are_put_together_as_one_process_does():
    from transformers.trainer_pt_utils import LengthGroupedSampler

    torch.manual_seed(0)
    alone = list(LengthGroupedSampler(8, lengths=list(range(200))))
    assert run_ranks(_grouped, 2) == [alone] * 2


def _grouped() -> list[int]:
    """Batches of 4 on each of two ranks."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    torch.manual_seed(torch.distributed.get_rank())
    return list(
        share_order(scale_length_grouping(LengthGroupedSampler(4, lengths=list(range(200)))))
    )


def test_orders_by_a_seed_are_the_first_ranks_too():
    first, other = run_ranks(_seeded, 2)
    assert first == other
    assert first[0] != first[1]


def _seeded() -> list[list[int]]:
    torch.manual_seed(torch.distributed.get_rank())
    sampler = prepare_sampler(RandomSampler(NUMBERS), seedable=True, seed=get_shared_seed())
    return [list(sampler) for _ in range(2)]


def test_what_needs_no_numbers_stays_as_it_is():
    for sampler in (
        SequentialSampler(NUMBERS),
        RandomSampler(NUMBERS, generator=torch.Generator()),
    ):
        assert share_order(sampler) is sampler
