"""The optimizer's step while the backward goes on, and state that lies on the host."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gpumix.engine.update_guard import UpdateGuard
from gpumix.hardware.memory_limit import limit_memory
from gpumix.schema.errors import InputError
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import (
    Share,
    Trained,
    batches,
    engine_alone,
    engine_for,
    joined,
    own_rows,
    pieces_of,
    train_alone,
    worst_error,
)

GPT2 = ARCHITECTURES["gpt2"]
STEPS = 3
INLINE = Mode(order="sequential", recompute=False)


def _train(shares, on_host, early, settings):
    engine = engine_for(GPT2.factory, shares, on_host=on_host, **settings)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches(GPT2, sum(s.samples for s in shares), STEPS):
        rows = own_rows(batch, shares, engine.comm.rank)
        losses.append(engine.step(rows, optimizer if early else None).item())
        if not early:
            optimizer.step()
        optimizer.zero_grad()
    return losses, pieces_of(engine)


# ZeRO stage, who has its state on its host, whether the optimizer steps early.
CASES = list(product([0, 1, 2, 3], [(0, 1), (0,), ()], [True, False]))
# Each way to hold state once.
FEW = [(0, (), True), (2, (0,), False), (3, (0, 1), True)]


@pytest.fixture(scope="module")
def trained(request):
    return run_ranks(_train_each, 2, list(chosen(request, dict.fromkeys(CASES))))


@pytest.mark.parametrize(
    "case",
    left_out(((case,) for case in CASES), [(case,) for case in CASES if case not in FEW]),
    ids=str,
)
def test_it_trains_like_one_process(case, trained):
    of_ranks = [of_rank[case] for of_rank in trained]
    found = Trained(of_ranks[0][0], joined([pieces for _, pieces in of_ranks]))
    assert worst_error(found, train_alone(GPT2, 5, STEPS)) < 2e-5


def _train_each(cases):
    found = {}
    for stage, on_host, early in cases:
        shares = [Share(3, 2, 1), Share(2, 1, 2, INLINE if stage < 2 else Mode())]
        found[stage, on_host, early] = _train(shares, on_host, early, {"zero_stage": stage})
    return found


def test_a_loss_that_is_not_finite_holds_back_the_updates_of_its_step():
    """Also those that are made before the step ends, and all that follow."""
    engine = engine_alone(GPT2.factory, 2, 1)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1, fused=True)
    good, bad = batches(GPT2, 2, 2)
    engine.guard = UpdateGuard(engine.device)
    engine.step(good, optimizer)
    before = {name: p.detach().clone() for name, p in engine.named_parameters()}
    bad["labels"] = torch.full_like(bad["labels"], -100)  # a mean of no labels
    assert engine.step(bad, optimizer).isnan()
    engine.step(good, optimizer)
    assert all(torch.equal(p, before[name]) for name, p in engine.named_parameters())
    counted, steps = engine.losses_counted, engine.steps
    for _ in range(2):
        engine.take_back_step()
    assert engine.steps == steps - 2
    assert engine.losses_counted == counted


def test_all_parameters_have_been_updated_when_a_step_ends():
    engine = engine_alone(GPT2.factory, 2, 1)
    before = {name: p.detach().clone() for name, p in engine.named_parameters()}
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1, fused=True)
    engine.step(next(batches(GPT2, 2, 1)), optimizer)
    assert all((p != before[name]).any() for name, p in engine.named_parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(before)]


def test_an_optimizer_that_looks_at_more_than_elements_cannot_step_early():
    engine = engine_alone(GPT2.factory, 2, 1)
    optimizer = torch.optim.RMSprop(engine.parameters())
    with raises(InputError, code="optimizer-step-too-early"):
        engine.step(next(batches(GPT2, 2, 1)), optimizer)


def _device_bytes(on_host):
    memory = limit_memory(None)
    engine = engine_alone(GPT2.factory, 2, 1, on_host=on_host, zero_stage=2)
    optimizer = torch.optim.AdamW(engine.parameters(), fused=True)
    before = memory.current_bytes
    engine.step(next(batches(GPT2, 2, 1)), optimizer)
    engine.step(next(batches(GPT2, 2, 1)))
    optimizer.step()
    masters = sum(p.nbytes for p in engine.parameters())
    return memory.current_bytes - before, masters


def test_state_on_the_host_is_none_of_the_devices():
    ((on_device, masters),) = run_ranks(_device_bytes, 1, ())
    ((on_host, _),) = run_ranks(_device_bytes, 1, (0,))
    assert on_device > 2 * masters
    assert on_host < 0.2 * masters
