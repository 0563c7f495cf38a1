"""State on the host: what the device is given of it, and how much memory of the host it takes."""

from __future__ import annotations

import pytest
import torch

from gpumix.engine.offload.copy_lanes import CopyLane
from gpumix.engine.offload.state_transfers import HostMasters, StateTransfers
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import batches, engine_alone

CPU = torch.device("cpu")
GPT2 = ARCHITECTURES["gpt2"]


@pytest.fixture
def masters():
    found = HostMasters(3, (torch.float32, torch.bfloat16), StateTransfers(CPU), CPU)
    found.master.copy_(torch.tensor([1.0, 1.001, 3.0]))
    return found


def test_masters_are_rounded_once_in_a_step_and_again_in_the_next(masters):
    first = masters.values()
    assert first.dtype == torch.bfloat16
    assert first.tolist() == [1.0, 1.0, 3.0]
    masters.master.mul_(2)  # an early update, behind the last gather
    assert masters.values().tolist() == [1.0, 1.0, 3.0]
    masters.may_change()
    assert masters.values().tolist() == [2.0, 2.0, 6.0]


def test_masters_that_nothing_rounds_are_given_as_they_are():
    found = HostMasters(3, (torch.float32, torch.float32), StateTransfers(CPU), CPU)
    assert found.values() is found.master


def test_a_lane_of_a_cpu_is_no_stream():
    lane, done = CopyLane(CPU), []
    with lane.active():
        done.append(lane.uses(torch.ones(1)))
    lane.mark().block_current_stream()
    lane.mark().wait()
    assert not lane.is_stream and len(done) == 1


@pytest.mark.parametrize(("dtype", "bytes_per_element"), [("fp32", 8), ("bf16", 10)])
def test_the_host_keeps_what_is_predicted(dtype, bytes_per_element):
    """Masters and gradients in fp32, and in a narrow dtype what masters are rounded to."""
    engine = engine_alone(GPT2.factory, 2, 1, on_host=(0,), compute_dtype=dtype)
    engine.step(next(batches(GPT2, 2, 1)))
    held = elements = 0
    for shard in engine.trained_shards():
        given = {id(t): t for t in (shard.master, shard.gradient, shard._host.values())}
        held += sum(tensor.nbytes for tensor in given.values())
        elements += shard.master.numel()
    assert held == bytes_per_element * elements


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_whoever_writes_into_parameters_between_steps_is_heeded(dtype):
    losses = {}
    batch = next(batches(GPT2, 2, 1))
    for on_host in ((), (0,)):
        engine = engine_alone(GPT2.factory, 2, 1, on_host=on_host, compute_dtype=dtype)
        losses[on_host] = [engine.step(batch).item()]
        for parameter in engine.parameters():
            parameter.data.mul_(0.5)  # which no version counter sees
        losses[on_host] += [engine.evaluate(batch).item(), engine.step(batch).item()]
    assert losses[()] == pytest.approx(losses[(0,)], rel=1e-6)
    assert losses[()][0] != losses[()][2]
