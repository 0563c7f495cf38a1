"""Bad updates are held back where they would be made, and numbers are read when they are wanted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpumix.engine.comm.async_read import AsyncRead
from gpumix.engine.comm.wait_clock import WaitClock
from gpumix.engine.update_guard import UpdateGuard, can_skip_updates, is_first_momentum_step

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(1.0), torch.tensor(float("nan"))
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_from_a_bad_step_on_nothing_changes(name, bad):
    parameter = nn.Parameter(torch.arange(4.0))
    optimizer, guard = OPTIMIZERS[name]([parameter]), UpdateGuard(CPU)

    def step(loss: torch.Tensor, gradient: float) -> None:
        parameter.grad = torch.full((4,), gradient)
        guard.see(loss, GOOD)
        with guard.over(optimizer):
            optimizer.step()

    step(GOOD, 1.0)
    assert not torch.equal(parameter, torch.arange(4.0))
    before = parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())
    step(torch.tensor(bad), bad)
    step(GOOD, 1.0)  # given before anybody knew of the bad one
    assert torch.equal(parameter, before[0])
    after = optimizer.state_dict()["state"][0]
    assert {key: value.tolist() for key, value in after.items()} == {
        key: value.tolist() for key, value in before[1]["state"][0].items()
    }
    assert not hasattr(optimizer, "found_inf")


def test_only_fused_optimizers_leave_a_step_out():
    parameter = [nn.Parameter(torch.zeros(1))]
    assert all(can_skip_updates(make(parameter)) for make in OPTIMIZERS.values())
    assert not can_skip_updates(torch.optim.AdamW(parameter, foreach=True))
    assert not can_skip_updates(torch.optim.SGD(parameter))


def test_momentum_is_made_by_a_step_that_is_looked_at():
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([first, second], lr=1.0, momentum=0.9, fused=True)
    first.grad = torch.ones(1)
    assert is_first_momentum_step(optimizer)
    optimizer.step()
    assert not is_first_momentum_step(optimizer)
    second.grad = torch.ones(1)
    assert is_first_momentum_step(optimizer)
    assert not is_first_momentum_step(torch.optim.SGD([first], lr=1.0, fused=True))
    assert not is_first_momentum_step(torch.optim.AdamW([first], fused=True))


def test_a_reading_is_of_the_moment_at_which_it_was_made():
    table, loss = torch.arange(6, dtype=torch.float64).view(2, 3), torch.tensor(0.1)
    reading = AsyncRead([table, loss])
    table.zero_()
    loss.zero_()
    assert reading.is_complete
    read, number = reading.tensors()
    assert read.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert number.item() == torch.tensor(0.1).item()
    assert AsyncRead([torch.tensor(2), torch.tensor(0.5)]).numbers() == [2, 0.5]


def test_a_clock_tells_of_waits_before_a_mark():
    clock = WaitClock(CPU)
    with clock:
        pass
    first = clock.mark()
    with clock:
        sum(range(10_000))
    assert 0 < clock.at_s(first) < clock.total_s() == clock.at_s(clock.mark())
