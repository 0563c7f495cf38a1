"""State that moves between ranks while they train.

Each element is updated by itself, and gradients are summed in the order of ranks whatever they
own: so nothing changes to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpumix.engine.engine import Engine
from gpumix.engine.model.deferred_init import build
from gpumix.hardware.memory_limit import limit_memory
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Collectives, Plan
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import (
    SEED,
    Share,
    Trained,
    batches,
    engine_for,
    joined,
    optimizer_for,
    own_rows,
    pieces_of,
    plan_for,
    train_alone,
    worst_error,
)
from helpers.training.staging import EVERY

GPT2 = ARCHITECTURES["gpt2"]
STEPS = 5
SAMPLES = [(3, 2), (2, 1), (1, 1)]
# Of the state, in turn: one rank has none, another all, some change places.
STATES = [(1, 2, 3), (3, 0, 1), (0, 1, 0), (2, 2, 1), (1, 2, 3)]
STAY = STATES[:1] * STEPS


def shares_of(state: tuple[int, ...], samples=SAMPLES) -> list[Share]:
    return [Share(n, m, part) for (n, m), part in zip(samples, state)]


SETTINGS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "bf16": {"zero_stage": 1, "compute_dtype": "bf16"},
    "bf16 and fp32": {"zero_stage": 3, "compute_dtype": ["bf16", "fp32", "bf16"]},
    "one on its host": {"zero_stage": 2, "on_host": [1]},
    "parameters on the host": {"parameters_on": "host"},
}


# By name: model, setting, optimizer.
CASES: dict[str, tuple[str, str, str]] = {
    ", ".join(case): case
    for case in [
        ("gpt2", "stage 1", "AdamW"),
        ("gpt2", "stage 2", "SGD"),
        ("gpt2", "stage 3", "SGD"),
        ("gpt2", "bf16", "SGD"),
        ("gpt2", "bf16 and fp32", "AdamW"),
        ("gpt2", "one on its host", "AdamW"),
        ("gpt2", "parameters on the host", "AdamW"),
        ("branching", "stage 3", "AdamW"),
        ("frozen", "stage 3", "AdamW"),
    ]
}


@pytest.fixture(scope="module")
def trained(request):
    """Of each rank by case: where state stays, and where it moves."""
    return run_ranks(_train_each, 3, list(chosen(request, CASES)))


def _train_each(cases: list[str]) -> dict[str, list[Any]]:
    return {
        case: [_train(name, states, SETTINGS[setting], optimizer) for states in (STAY, STATES)]
        for case in cases
        for name, setting, optimizer in [CASES[case]]
    }


@pytest.mark.parametrize("case", left_out(CASES, CASES.keys() - {"gpt2, bf16 and fp32, AdamW"}))
def test_nothing_changes_to_the_last_bit(case, trained):
    """Nor what is frozen, or used in some steps only."""
    stays, moves = zip(*(of_rank[case] for of_rank in trained))
    assert [losses for losses, _, _ in moves] == [losses for losses, _, _ in stays]
    for which in (1, 2):
        expected = joined([of_rank[which] for of_rank in stays])
        found = joined([of_rank[which] for of_rank in moves])
        assert expected.keys() == found.keys()
        for name, value in found.items():
            assert np.array_equal(value, expected[name]), name


@pytest.mark.extended
def test_in_forms_that_add_up_in_orders_of_their_own():
    """What these sum depends on the cuts, in the last digits."""
    padded = Collectives(gather="padded", reduce="padded", padding=3.0)
    settings = {"zero_stage": 3, "collectives": padded}
    found = run_ranks(_train, 3, "gpt2", STATES, settings, "SGD")
    losses = found[0][0]
    stays = run_ranks(_train, 3, "gpt2", STAY, settings, "SGD")
    assert losses == pytest.approx(stays[0][0], rel=1e-6)
    weights, expected = (joined([pieces for _, pieces, _ in one]) for one in (found, stays))
    assert worst_error(Trained(losses, weights), Trained(stays[0][0], expected)) < 1e-5


def optimizer_of(name: str, engine: Engine) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(engine.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(engine.parameters(), lr=1e-3, foreach=True)


def _train(
    model: str, states: list[tuple[int, ...]], settings: dict[str, Any], optimizer_name: str
) -> tuple[list[float], Any, Any]:
    """Losses, and pieces of the weights and of what the optimizer keeps; a step by each division
    of the state."""
    architecture = EVERY.get(model, GPT2)
    factory = frozen_block if model == "frozen" else architecture.factory
    engine = engine_for(factory, shares_of(states[0]), **settings)
    optimizer = optimizer_of(optimizer_name, engine)
    losses = []
    size = sum(n for n, _ in SAMPLES)
    for batch, state in zip(batches(architecture, size, len(states)), states, strict=True):
        plan = plan_for(build(factory, SEED), shares_of(state), **settings)
        engine.replan(plan, optimizer)
        loss = engine.step(own_rows(batch, shares_of(state), engine.comm.rank))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    kept = [
        (f"{piece.name}.{key}", tuple(piece.shape), offset, part.numpy().copy())
        for piece in engine.pieces()
        for key, value in optimizer.state.get(piece.local, {}).items()
        if value.dim() == 1
        for (offset, _), part in piece.window.boxes(piece.start, value.cpu())
    ]
    return losses, [(*p[:3], p[3].copy()) for p in pieces_of(engine)], kept


def _state_on_device() -> tuple[int, int]:
    """By how much memory of this rank's device rises as it gets all of the state, on its host."""
    memory = limit_memory(None)
    settings = {"zero_stage": 2, "on_host": [1]}
    samples = SAMPLES[:2]
    before, after = (shares_of(state, samples) for state in [(3, 0), (0, 3)])
    engine = engine_for(GPT2.factory, before, **settings)
    optimizer = optimizer_of("AdamW", engine)
    batch = next(batches(GPT2, 5, 1))
    engine.step(own_rows(batch, before, engine.comm.rank))
    optimizer.step()
    optimizer.zero_grad()
    filled = memory.current_bytes
    engine.replan(plan_for(build(GPT2.factory, SEED), after, **settings), optimizer)
    return memory.current_bytes - filled, 2 * sum(p.nbytes for p in engine.parameters())


@pytest.mark.extended
def test_state_moves_into_the_hosts_memory():
    _, (risen, state) = run_ranks(_state_on_device, 2)
    assert risen < 0.5 * state  # buffers of reductions are made anew


def frozen_block():
    model = GPT2.factory()
    model.transformer.h[1].requires_grad_(False)
    return model


@pytest.mark.extended
def test_samples_and_state_change_together():
    expected = train_alone(GPT2, 6, STEPS)
    results = run_ranks(_train_with_other_samples, 3)
    found = Trained(results[0][0], joined([pieces for _, pieces in results]))
    assert worst_error(found, expected) < 1e-5


def _train_with_other_samples() -> tuple[list[float], Any]:
    samples = [SAMPLES, [(0, 0), (4, 2), (2, 2)], [(1, 1), (1, 1), (4, 3)], SAMPLES, SAMPLES]
    first = shares_of(STATES[0], samples[0])
    engine = engine_for(GPT2.factory, first, zero_stage=3)
    optimizer = optimizer_for(engine.parameters())
    losses = []
    for number, batch in enumerate(batches(GPT2, 6, STEPS)):
        shares = shares_of(STATES[number], samples[number])
        engine.replan(plan_for(build(GPT2.factory, SEED), shares, zero_stage=3), optimizer)
        losses.append(engine.step(own_rows(batch, shares, engine.comm.rank)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, pieces_of(engine)


FIXED = "cannot be divided anew while a run trains"


def test_what_cannot_be_moved_is_refused():
    assert (
        run_ranks(_refused, 2)
        == [
            [
                "a running engine cannot move the state of this plan",
                f"the state of an optimizer that was not given {FIXED}",
                f"the state of Adagrad {FIXED}",
                "a running engine can change only the split of the samples or of the state",
            ]
        ]
        * 2
    )


def _refused() -> list[str]:
    before, after = [Share(2, 2, 1), Share(2, 1, 2)], [Share(2, 2, 3), Share(2, 1, 1)]
    found = []
    engine = engine_for(GPT2.factory, before, zero_stage=3)
    adagrad = torch.optim.Adagrad(engine.parameters())
    native = Collectives(gather="native", reduce="native")
    alone = engine_for(GPT2.factory, before, zero_stage=3, collectives=native)
    for one, optimizer, settings in [
        (alone, None, {"zero_stage": 3, "collectives": native}),
        (engine, None, {"zero_stage": 3}),
        (engine, adagrad, {"zero_stage": 3}),
        (engine, adagrad, {"zero_stage": 2}),
    ]:
        plan = plan_for(build(GPT2.factory, SEED), after, **settings)
        try:
            one.replan(plan, optimizer)
        except InputError as error:
            found.append(error.what)
    return found


def test_a_plan_for_other_samples_alone_moves_nothing():
    ((given,),) = run_ranks(_counted, 1)
    assert given == 0


def _counted() -> list[int]:
    engine = engine_for(GPT2.factory, [Share(2, 2, 1)], zero_stage=1)
    plan: Plan = plan_for(build(GPT2.factory, SEED), [Share(2, 1, 1)], zero_stage=1)
    engine.replan(plan)
    return [engine.comm.counts["exchange_parts"]]
