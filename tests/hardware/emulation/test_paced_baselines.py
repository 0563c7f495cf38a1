"""DDP, FSDP2 and tensor parallelism run unchanged on emulated devices: two ranks on loopback."""

from __future__ import annotations

import multiprocessing
import queue
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from gpumix.hardware.emulation.pacer import Pacer
from helpers.virtual_clock import VirtualClock

RANKS, ROWS, WIDTH, STEPS = 2, 4, 8, 3
RATE = 1e3  # every product is longer than the lead that hides behind a wait
WAIT_S = 10.0  # how long every wait for a collective takes in virtual time
TIMEOUT_S = 60
LAYER_FLOPS = 2 * ROWS * WIDTH * WIDTH


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def ddp(net):
    return DistributedDataParallel(net)


def fsdp(net):
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def tensor_parallel(net):
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def losses(net, rank, *, same_data):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0 if same_data else rank)
    found = []
    for _ in range(STEPS):
        loss = net(torch.randn(ROWS, WIDTH, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def rank_main(rank, wrap, store_path, results):
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, RANKS)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    same_data = wrap is tensor_parallel
    expected = losses(wrap(model()), rank, same_data=same_data)

    clock, waits, original = VirtualClock(), [], dist.Work.wait

    def slow_wait(work, *args):
        clock.spend(WAIT_S)
        waits.append(work)
        return original(work, *args)

    dist.Work.wait = slow_wait
    with Pacer(RATE, clock=clock, sleep=clock.sleep) as pacer:
        start = clock.now
        found = losses(wrap(model()), rank, same_data=same_data)
        pacer.timeline.drain()
    dist.Work.wait = original
    results.put(
        {
            "same": found == expected,
            "flops": pacer.timeline.flops,
            "overruns": pacer.timeline.overruns,
            "waits": len(waits),
            "computed_s": clock.now - start - WAIT_S * len(waits),
        }
    )
    dist.destroy_process_group()


@pytest.fixture
def run_ranks(tmp_path):
    processes = []

    def run(wrap):
        context = multiprocessing.get_context("forkserver")
        results = context.Queue()
        for rank in range(RANKS):
            arguments = (rank, wrap, str(tmp_path / "store"), results)
            processes.append(context.Process(target=rank_main, args=arguments))
            processes[-1].start()
        return [next_result(results, processes) for _ in processes]

    yield run
    for process in processes:
        process.join(timeout=TIMEOUT_S)
        process.kill()


def next_result(results, processes):
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            return results.get(timeout=0.5)
        except queue.Empty:
            assert all(p.exitcode in (None, 0) for p in processes), "a rank died"
    raise AssertionError("a rank hangs")


# Forward of both layers, backward of both; the first layer's input needs no gradient.
FULL = STEPS * LAYER_FLOPS * 5


@pytest.mark.parametrize(
    ("wrap", "flops"),
    [
        (ddp, FULL),  # its waits are in C++
        (fsdp, FULL),
        (tensor_parallel, FULL // RANKS),
    ],
)
def test_baselines_are_paced_by_their_own_flops_and_never_by_their_waits(run_ranks, wrap, flops):
    for found in run_ranks(wrap):
        assert found["same"], "emulation changed the losses"
        assert found["flops"] == flops
        assert found["overruns"] == 0
        assert found["waits"] > 0 or wrap is ddp
        assert found["computed_s"] == pytest.approx(flops / RATE)
