"""What ranks are counted to send adds up to what must come to all of them."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist

from gpumix.engine.comm.communicator import Communicator
from gpumix.schema.plan.splitting import ShardIntervals
from helpers.processes.harness import run_ranks

RANKS, NUMEL = 3, 12
OFFSETS = (0, 2, 6, NUMEL)  # of unequal intervals
BYTES = 4 * NUMEL


def _sent() -> dict[str, int]:
    rank = dist.get_rank()
    comm = Communicator(dist.group.WORLD, rank=rank, world=RANKS)
    pair = comm.among((0, 2))
    full = torch.ones(NUMEL)
    own = full[OFFSETS[rank] : OFFSETS[rank + 1]].clone()
    comm.gather(full, own, ShardIntervals(OFFSETS), "gather").wait()
    comm.reduce(full, ShardIntervals(OFFSETS), "reduction", lambda rows: None).wait()
    comm.all_reduce(full, "all-reduce")
    comm.exchange(full, "rows")[1].wait()
    if pair is not None:
        pair.pass_on(full, 1, "message").wait()
        pair.all_reduce(full, "all-reduce of two")
    return dict(comm.sent)


def test_each_rank_gets_what_it_lacks_and_gives_what_others_own():
    ranks = run_ranks(_sent, RANKS)
    lacking = sum(NUMEL - (end - begin) for begin, end in pairwise(OFFSETS)) * 4
    assert sum(sent["gather"] for sent in ranks) == lacking
    assert sum(sent["reduce"] for sent in ranks) == lacking
    # A reduction, then a gather; of two ranks each sends half of it twice.
    assert sum(sent["all_reduce"] for sent in ranks) == 2 * lacking + 2 * BYTES
    assert [sent["exchange"] for sent in ranks] == [(RANKS - 1) * BYTES] * RANKS
    assert [sent.get("send", 0) for sent in ranks] == [0, 0, BYTES]
    assert [sent.get("receive", 0) for sent in ranks] == [0, 0, 0]
