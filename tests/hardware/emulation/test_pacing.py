"""The pacer slows any torch code of its thread; waits for communication earn nothing."""

from __future__ import annotations

import os
import sys
import threading

import greenlet
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from gpumix.hardware.emulation.pacer import Pacer
from gpumix.hardware.emulation.timeline import CREDIT_S
from helpers.virtual_clock import VirtualClock

SIDE = 10
MM_FLOPS = 2 * SIDE**3


@pytest.fixture
def clock():
    return VirtualClock()


def pacer(clock, rate=MM_FLOPS):
    """One product of `product()` takes a second at the default rate."""
    return Pacer(rate, clock=clock, sleep=clock.sleep)


def product():
    return torch.ones(SIDE, SIDE) @ torch.ones(SIDE, SIDE)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def slow_wait(clock, monkeypatch, group_of_one):
    """Every wait for a collective takes 10 s."""
    original = dist.Work.wait

    def wait(work, *args):
        clock.spend(10)
        return original(work, *args)

    monkeypatch.setattr(dist.Work, "wait", wait)


@pytest.mark.parametrize("speed", [1, 2, 4])
def test_a_training_step_takes_its_flops_over_the_rate(clock, speed):
    layer = nn.Linear(8, 8)
    start = clock.now
    with pacer(clock, rate=speed * 1e3) as paced:
        layer(torch.ones(4, 8)).sum().backward()
        paced.timeline.drain()
    assert paced.timeline.flops == 2 * (2 * 4 * 8 * 8)  # no gradient for the input
    assert clock.now - start == pytest.approx(paced.timeline.flops / (speed * 1e3))


def test_nothing_is_paced_outside_the_block(clock):
    wait = dist.Work.wait
    with pacer(clock):
        assert dist.Work.wait is not wait
    product()
    assert clock.sleeps == []
    assert dist.Work.wait is wait


def test_the_block_is_left_clean_after_an_error(clock):
    wait = dist.Work.wait
    with pytest.raises(ZeroDivisionError), pacer(clock):
        raise ZeroDivisionError
    product()
    assert clock.sleeps == []
    assert dist.Work.wait is wait


def test_an_interrupt_during_the_devices_time_passes():
    def interrupted(seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Pacer(1.0, sleep=interrupted):
        product()


def test_coroutines_are_paced_wherever_they_were_entered(clock):
    def work():
        product()
        outer.switch()
        product()

    outer = greenlet.getcurrent()
    inner = greenlet.greenlet(work)
    with pacer(clock) as paced:
        inner.switch()
        product()
        inner.switch()
    assert paced.timeline.flops == 3 * MM_FLOPS


def test_overruns_are_reported(clock):
    with pacer(clock) as paced:
        clock.spend(1.0)
        product()
        assert paced.timeline.overruns == 1
        assert paced.timeline.overrun_s == pytest.approx(1.0 - CREDIT_S)
        paced.timeline.reset()
        product()
        assert (paced.timeline.overruns, paced.timeline.overrun_s) == (0, 0.0)


def test_idle_time_is_no_overrun(clock):
    with pacer(clock) as paced:
        clock.spend(1000)
        paced.timeline.idle()
        product()
    assert paced.timeline.overruns == 0
    assert clock.sleeps == [pytest.approx(1.0)]


def collectives():
    x, y = torch.ones(4), torch.ones(4)
    yield "all_reduce", lambda: dist.all_reduce(x)
    yield "asynchronous", lambda: dist.all_reduce(x, async_op=True).wait()
    yield "broadcast", lambda: dist.broadcast(x, 0)
    yield "all_to_all_single", lambda: dist.all_to_all_single(y, x)
    yield "barrier", lambda: dist.barrier()


@pytest.mark.parametrize("name", [name for name, _ in collectives()])
def test_waiting_for_a_collective_earns_no_credit(clock, slow_wait, name):
    run = dict(collectives())[name]
    with pacer(clock) as paced:
        run()
        product()
    assert paced.timeline.overruns == 0
    assert clock.sleeps == [pytest.approx(1.0)]


@pytest.mark.parametrize("said", [True, False])
def test_functional_collectives_earn_no_credit(clock, group_of_one, monkeypatch, said):
    """With or without a call of `wait_tensor`: the first use of the result waits."""
    waits = []
    with pacer(clock) as paced:
        monkeypatch.setattr(
            type(paced.timeline), "waiting", recording(type(paced.timeline).waiting, waits)
        )
        result = functional.all_reduce(torch.ones(SIDE, SIDE), "sum", dist.group.WORLD)
        result = functional.wait_tensor(result) if said else result
        result @ result
    assert waits
    assert paced.timeline.flops == MM_FLOPS


def recording(original, calls):
    def waiting(self):
        calls.append(self)
        return original(self)

    return waiting


def test_waiting_for_a_future_earns_no_credit(clock, monkeypatch):
    monkeypatch.setattr(torch.futures.Future, "wait", lambda future: clock.spend(10))
    with pacer(clock) as paced:
        torch.futures.Future().wait()
        product()
    assert paced.timeline.overruns == 0
    assert clock.sleeps == [pytest.approx(1.0)]


def test_a_wait_in_another_thread_is_not_the_devices(clock, slow_wait):
    def elsewhere():
        dist.all_reduce(torch.ones(4))

    with pacer(clock) as paced:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        product()
    assert paced.timeline.overruns == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_loader_worker_is_not_paced(clock):
    with pacer(clock) as paced:
        child = os.fork()
        if child == 0:
            product()
            os._exit(len(clock.sleeps) + paced.timeline.flops)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.extended
def test_torchs_compiler_is_not_imported(run_python):
    code = """
        import sys, torch
        from gpumix.hardware.emulation.pacer import Pacer
        with Pacer(1e18):
            torch.ones(2, 2) @ torch.ones(2, 2)
        print("torch._dynamo" in sys.modules)
    """
    assert run_python(code).stdout.strip() == "False"
