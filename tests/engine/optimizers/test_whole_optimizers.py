"""Adafactor and Muon over pieces against torch's own over the whole parameters.

Both get the same gradients, so that what differs is the optimizer's alone.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import gpumix
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.optimizers.layout import LayoutPart
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import checkpointer, odd, whole
from helpers.training.checkpoints import optimizer_values as state_values
from helpers.training.reference import engine_for, joined, pieces_of
from helpers.training.whole_optimizers import (
    FACTORIES,
    PLANS,
    STEPS,
    assert_close,
    expected_after,
    is_hidden,
    make,
    train_rank,
    trained_by_torch,
    update_pieces,
)


@functools.cache
def trained(kind, model, plan):
    return run_ranks(train_rank, len(PLANS[plan]), kind, model, PLANS[plan])


every_model = pytest.mark.parametrize("model", left_out(FACTORIES, ["gpt2"]))


@every_model
@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_results_are_those_of_torch(kind, model):
    expected = expected_after(kind, FACTORIES[model])
    for plan in PLANS:
        assert_close(joined([pieces for pieces, *_ in trained(kind, model, plan)]), expected)


@every_model
def test_muon_gives_the_same_bits_however_matrices_are_cut(model):
    alone = joined([pieces for pieces, *_ in trained("muon", model, "one rank")])
    for plan in PLANS:
        found = joined([pieces for pieces, *_ in trained("muon", model, plan)])
        hidden = _hidden(model)
        assert len(hidden) == {"odd": 3, "gpt2": 12}[model]
        assert all(np.array_equal(found[name], alone[name]) for name in hidden)


def _hidden(model):
    """The sizes of what Muon updates."""
    named = FACTORIES[model]().named_parameters()
    return {n: p.numel() for n, p in named if p.requires_grad and is_hidden(n, p.shape)}


# -- what is communicated --------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("plan", PLANS)
def test_adafactor_sums_twice_a_step(model, plan):
    for _, counts, _ in trained("adafactor", model, plan):
        assert counts == {"all_reduce": 2 * STEPS}


@every_model
def test_muon_exchanges_twice_a_step_what_is_cut(model):
    results = trained("muon", model, "three, one without state")
    assert [counts for _, counts, _ in results] == [{"exchange_parts": 2 * STEPS}] * 3
    # There and back in bf16; what nobody needs to send stays where it is.
    assert 0 < sum(sent for *_, sent in results) <= STEPS * 2 * 2 * sum(_hidden(model).values())


@every_model
@pytest.mark.parametrize("plan", ["one rank", "three, all on one"])
def test_muon_exchanges_nothing_where_matrices_are_whole(model, plan):
    for _, counts, _ in trained("muon", model, plan):
        assert counts == {}


def _step_without_gradients(kind, shares):
    engine = engine_for(odd, shares)
    optimizer = make(kind, engine)
    update_pieces(engine, optimizer, range(1))
    counts, before = engine.comm.counts.copy(), pieces_of(engine)
    values = [v.copy() for *_, v in before]
    state = state_values(engine, optimizer)
    optimizer.step()
    same = all(np.array_equal(a, b) for a, (*_, b) in zip(values, pieces_of(engine)))
    after = state_values(engine, optimizer)
    return same and repr(state) == repr(after), dict(engine.comm.counts - counts)


@pytest.mark.parametrize("kind", left_out(["adafactor", "muon"], ["adafactor"]))
def test_a_step_without_gradients_is_passed_over(kind):
    """As after an overflow in fp16: nothing moves, and nobody waits for anybody."""
    shares = PLANS["three, one without state"]
    assert run_ranks(_step_without_gradients, 3, kind, shares) == [(True, {})] * 3


# -- checkpoints -----------------------------------------------------------------------------------


def _save(folder, kind, shares):
    engine = engine_for(odd, shares)
    optimizer = make(kind, engine)
    update_pieces(engine, optimizer, range(2))
    checkpointer(folder).save(2, engine, optimizer, cursor={})
    return state_values(engine, optimizer)


def _resume(folder, kind, shares):
    engine = engine_for(odd, shares)
    optimizer = make(kind, engine)
    checkpointer(folder).load(engine, optimizer)
    state = state_values(engine, optimizer)
    update_pieces(engine, optimizer, range(2, STEPS))
    return state, pieces_of(engine)


@pytest.mark.parametrize("plan", left_out(["one rank", "two ranks"], ["one rank"]))
@pytest.mark.parametrize("kind", left_out(["adafactor", "muon"], ["adafactor"]))
def test_any_plan_takes_up_what_another_saved(kind, plan, tmp_path):
    saved = run_ranks(_save, 3, tmp_path, kind, PLANS["three, one without state"])
    state = whole(saved)
    expected = expected_after(kind, odd)
    results = run_ranks(_resume, len(PLANS[plan]), tmp_path, kind, PLANS[plan])
    loaded = whole([state for state, _ in results])
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert np.array_equal(np.asarray(loaded[name]), np.asarray(value)), name
    assert_close(joined([pieces for _, pieces in results]), expected)


def _state_after_steps(shares):
    engine = engine_for(odd, shares)
    optimizer = make("adafactor", engine)
    update_pieces(engine, optimizer, range(STEPS))
    return state_values(engine, optimizer)


@pytest.mark.extended
@pytest.mark.parametrize("plan", ["one rank", "three, one without state"])
def test_adafactors_averages_are_torchs(plan):
    found = whole(run_ranks(_state_after_steps, len(PLANS[plan]), PLANS[plan]))
    model, (optimizer,) = trained_by_torch("adafactor", odd)
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            mine = np.asarray(found[f"{name}.{key}"]).reshape(value.shape)
            np.testing.assert_allclose(mine, value.numpy(), rtol=1e-5, err_msg=f"{name}.{key}")


@pytest.mark.parametrize("shape", [(7,), (8, 12), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adafactor_updates_16_bit_parameters(shape, dtype):
    made = []
    for kind in (gpumix.Adafactor, torch.optim.Adafactor):
        generator = torch.Generator().manual_seed(1)
        p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        optimizer = kind([p])
        for _ in range(4):
            p.grad = torch.randn(shape, generator=generator).to(dtype)
            optimizer.step()
        made.append(p.detach())
        assert all(v.dtype == dtype for k, v in optimizer.state[p].items() if k != "step")
    torch.testing.assert_close(*made, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_adafactors_state_is_small():
    engine = engine_for(FACTORIES["gpt2"], PLANS["one rank"])
    optimizer = make("adafactor", engine)
    update_pieces(engine, optimizer, range(1))
    shapes = engine.shapes()
    expected = sum(4 + 4 * (sum(s) if len(s) == 2 else s.numel()) for s in shapes.values())
    held = [t for state in optimizer.state.values() for t in state.values()]
    assert sum(t.numel() * t.element_size() for t in held) == expected


# -- groups and layouts ----------------------------------------------------------------------------


def test_groups_decide_what_muon_updates():
    engine = engine_for(odd, PLANS["one rank"])
    groups = gpumix.parameter_groups(engine, {"match": "blocks.1.*weight", "use_muon": False})
    optimizer = gpumix.Muon(groups, engine.layout())
    names = {id(p): n for n, p in engine.named_parameters()}
    found = {names[id(p)] for g in optimizer.param_groups for p in g["params"] if g["use_muon"]}
    assert found == {"blocks.0.linear.weight", "blocks.2.linear.weight"}
    with raises(InputError, code="muon-shape-unsupported", what="blocks.0.filters"):
        gpumix.Muon(
            gpumix.parameter_groups(engine, {"match": "blocks.0*", "use_muon": True}),
            engine.layout(),
        )


def _layout_of_too_few(shares):
    engine = engine_for(odd, shares)
    alone = Communicator(None, rank=0, world=1)
    with raises(InputError, code="parameter-not-stored-once"):
        LayoutPart(engine.pieces(), alone)


def test_a_layout_of_other_ranks_is_refused():
    run_ranks(_layout_of_too_few, 2, PLANS["two ranks"])
