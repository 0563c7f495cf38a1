"""Collectives of tensors on devices run on a stream of their group, as NCCL's do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers.processes.harness import run_ranks

pytestmark = pytest.mark.gpu


def parts_of(rank: int, sizes: list[int]) -> list[torch.Tensor]:
    return [torch.full((size,), 1.0 + rank, device="cuda") for size in sizes]


def every_collective() -> dict[str, list[float]]:
    rank, sizes = dist.get_rank(), [3, 0, 2]
    mine = torch.full((sizes[rank],), 1.0 + rank, device="cuda")
    found = {}
    value = torch.full((2,), 1.0 + rank, device="cuda")
    dist.all_reduce(value)
    found["all-reduce"] = value.tolist()
    dist.broadcast(value.fill_(rank), 2)
    found["broadcast"] = value.tolist()
    gathered = [torch.zeros(size, device="cuda") for size in sizes]
    dist.all_gather(gathered, mine)
    found["all-gather"] = torch.cat(gathered).tolist()
    scattered = torch.zeros(sizes[rank], device="cuda")
    dist.reduce_scatter(scattered, parts_of(rank, sizes))
    found["reduce-scatter"] = scattered.tolist()
    table = torch.zeros(3, device="cuda")
    dist.all_gather_into_tensor(table, torch.full((1,), float(rank), device="cuda"))
    found["equal parts"] = table.tolist()
    room = torch.zeros(3 * sizes[rank], device="cuda")
    dist.all_to_all_single(room, torch.cat(parts_of(rank, sizes)), [sizes[rank]] * 3, sizes)
    found["all-to-all"] = room.tolist()
    torch.cuda.synchronize()  # nothing of an empty tensor was waited for
    return found


def test_results_of_every_collective():
    found = run_ranks(every_collective, 3, backend="nccl")
    for rank, size in enumerate([3, 0, 2]):
        assert found[rank] == {
            "all-reduce": [6.0, 6.0],
            "broadcast": [2.0, 2.0],
            "all-gather": [1.0] * 3 + [3.0] * 2,
            "reduce-scatter": [6.0] * size,
            "equal parts": [0.0, 1.0, 2.0],
            "all-to-all": [1.0] * size + [2.0] * size + [3.0] * size,
        }


def reduced(waits: bool) -> float:
    value = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(600_000_000)  # the collective comes after it, and so after the host's copy
    work = dist.all_reduce(value, async_op=True)
    side, host = torch.cuda.Stream(), torch.zeros(1, pin_memory=True)
    with torch.cuda.stream(side):
        if waits:
            work.wait()
        host.copy_(value, non_blocking=True)
    side.synchronize()
    found = float(host)
    work.wait()
    assert float(value) == 2.0
    return found


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_for_a_collective_reads_what_was_there(waits):
    assert run_ranks(reduced, 2, waits, backend="nccl") == [2.0 if waits else 1.0] * 2
