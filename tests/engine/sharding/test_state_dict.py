"""State by the model's own names: full tensors out and in, optimizer state by parameter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpumix.engine.model.deferred_init import build
from gpumix.engine.sharding.initial_weights import make_source
from gpumix.engine.sharding.state_dict import TensorPart
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import (
    adamw,
    assert_same,
    blank,
    model_values,
    odd,
    optimizer_values,
    trained,
    whole,
)
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import Share, engine_for

ALONE = [Share(6, 2, 1)]
UNEVEN = [Share(2, 1, 1), Share(1, 1, 0), Share(0, 0, 3), Share(3, 2, 2)]


@pytest.fixture(scope="module")
def of_ranks():
    """What each of four ranks comes to, which are started once."""
    state = model_values(trained(ALONE)[0])
    return run_ranks(_all_of_rank, 4, UNEVEN, state, timeout_s=120)


def _all_of_rank(shares, state):
    return {
        "all": _state_of_rank(shares, False),
        "of rank 0": _state_of_rank(shares, True),
        "loaded": _load_and_return(shares, state),
        "of the optimizer": _optimizer_of_rank(shares),
    }


def _state_of_rank(shares, rank0_only):
    engine = engine_for(odd, shares)
    state = engine.state_dict(rank0_only=rank0_only)
    return {name: tensor.numpy() for name, tensor in state.items()}


def plain_state():
    """The state dict of the unsharded model, with the values that the engine starts from."""
    model, recipe = odd(), build(odd, 7)
    value = make_source(recipe)
    with torch.no_grad():
        for (name, p), q in zip(model.named_parameters(), recipe.parameters()):
            p.copy_(value(name, q, 0, q.numel()).view(q.shape))
        for own, built in zip(model.buffers(), recipe.buffers()):
            own.copy_(built)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_full_state_is_the_unsharded_models(of_ranks):
    expected = plain_state()
    assert {"embedding.weight", "head.weight", "blocks.0.scale"} < expected.keys()
    for of_rank in of_ranks:
        assert_same(of_rank["all"], expected)


def test_only_rank_0_may_get_it(of_ranks):
    found = [of_rank["of rank 0"] for of_rank in of_ranks]
    assert_same(found[0], plain_state())
    assert found[1:] == [{}, {}, {}]


def test_the_unsharded_model_loads_it_strictly():
    engine, _ = trained(ALONE)
    model = odd()
    model.load_state_dict(engine.state_dict())
    assert torch.equal(model.head.weight, engine.state_dict()["embedding.weight"])


def test_tensors_have_memory_of_their_own():
    engine, _ = trained(ALONE)
    state = engine.state_dict()
    del state["head.weight"]  # the embedding's
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in state.values())
    state["embedding.weight"].zero_()
    assert engine.state_dict()["embedding.weight"].any()


def test_frozen_parameters_are_in_the_compute_dtype():
    engine = engine_for(odd, ALONE, compute_dtype="bf16")
    state = engine.state_dict()
    assert state["blocks.0.linear.weight"].dtype == torch.float32
    assert state["blocks.0.frozen"].dtype == torch.bfloat16
    assert state["blocks.0.order"].dtype == torch.int64


def _load_and_return(shares, state):
    engine, _ = blank(shares)
    engine.load_state_dict({name: torch.from_numpy(v) for name, v in state.items()})
    return model_values(engine)


def test_every_rank_takes_its_part_of_full_tensors(of_ranks):
    state = model_values(trained(ALONE)[0])
    for of_rank in of_ranks:
        assert_same(of_rank["loaded"], state)


@pytest.mark.parametrize("absent", ["embedding.weight", "head.weight"])
def test_one_name_of_a_tied_parameter_is_enough(absent):
    engine, _ = trained(ALONE)
    state = engine.state_dict()
    del state[absent]
    other, _ = blank(ALONE)
    other.load_state_dict(state)
    assert_same(model_values(other), model_values(engine))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda s: s.pop("blocks.1.gain"),
            {"code": "state-dict-of-another-model", "why": "blocks.1.gain"},
        ),
        (
            lambda s: s.pop("blocks.1.scale"),
            {"code": "state-dict-of-another-model", "why": "blocks.1.scale"},
        ),
        (
            lambda s: s.update(extra=torch.zeros(1)),
            {"code": "state-dict-of-another-model", "why": "extra"},
        ),
        (
            lambda s: s.update({"blocks.0.scratch": torch.zeros(2)}),
            {"code": "state-dict-of-another-model", "why": "blocks.0.scratch"},
        ),
        (
            lambda s: s.update({"blocks.2.filters": torch.zeros(3, 20)}),
            {"code": "state-dict-of-another-model", "why": ("blocks.2.filters", 3, 20, 4, 5)},
        ),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(change, why):
    engine, _ = trained(ALONE)
    before = model_values(engine)
    state = {name: torch.ones_like(t) for name, t in engine.state_dict().items()}
    change(state)
    with raises(InputError, **why):
        engine.load_state_dict(state)
    assert_same(model_values(engine), before)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_names_of_real_models(name):
    factory = ARCHITECTURES[name].factory
    engine = engine_for(factory, ALONE)
    assert engine.state_dict().keys() == factory().state_dict().keys()


# -- the optimizer ---------------------------------------------------------------------------------


def _optimizer_of_rank(shares):
    engine, optimizer = trained(shares)
    return optimizer_values(engine, optimizer)


def test_optimizer_state_is_by_parameter_also_where_nothing_is_stored(of_ranks):
    found = [of_rank["of the optimizer"] for of_rank in of_ranks]
    assert found[1].keys() == found[0].keys()  # rank 1 stores nothing
    assert {"embedding.weight.step", "blocks.0.gain.exp_avg_sq"} < found[1].keys()
    assert found[1]["embedding.weight.step"] == 2.0
    assert all(len(v[1]) == 0 for v in found[1].values() if isinstance(v, tuple))


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        lambda p: torch.optim.NAdam(p, lr=1e-2),
        lambda p: torch.optim.Rprop(p, lr=1e-3),
    ],
    ids=["AdamW", "AMSGrad", "SGD", "NAdam", "Rprop"],
)
def test_optimizer_state_survives_a_round(make):
    engine, optimizer = trained(ALONE, make=make)
    state = engine.optimizer_state(optimizer)
    assert all(isinstance(v, tuple) or np.ndim(v) == 0 for s in state.values() for v in s.values())
    other = make(engine.parameters())
    for group in other.param_groups:
        group["lr"] = 0.125
    engine.load_optimizer_state(other, state)
    found, expected = (whole([optimizer_values(engine, o)]) for o in (other, optimizer))
    assert_same(found, expected)
    assert all(group["lr"] == 0.125 for group in other.param_groups)


def test_no_state_before_the_first_step():
    engine = engine_for(odd, ALONE)
    optimizer = adamw(engine.parameters())
    assert engine.optimizer_state(optimizer) == {}
    engine.load_optimizer_state(optimizer, {})
    assert not optimizer.state


def test_another_models_optimizer_is_refused():
    engine, _ = trained(ALONE)
    foreign = adamw(odd().parameters())
    with raises(InputError, code="optimizer-of-foreign-tensors"):
        engine.optimizer_state(foreign)


def test_state_that_belongs_to_no_element_is_refused():
    engine, optimizer = trained(ALONE)
    optimizer.state[next(engine.parameters())]["blocks"] = torch.zeros(3)
    with raises(InputError, code="optimizer-state-not-divisible", what="blocks"):
        engine.optimizer_state(optimizer)


def test_state_cut_by_another_plan_is_refused():
    engine, optimizer = trained(ALONE)
    state = engine.optimizer_state(optimizer)
    (part,) = state["embedding.weight"]["exp_avg"]
    state["embedding.weight"]["exp_avg"] = (TensorPart(part.window, 0, 5, part.local[:5]),)
    with raises(InputError, code="optimizer-state-of-other-plan"):
        engine.load_optimizer_state(optimizer, state)


def test_state_of_parameters_that_are_not_updated_is_refused():
    engine, optimizer = trained(ALONE)
    state = engine.optimizer_state(optimizer)
    fewer = adamw([p for n, p in engine.named_parameters() if n != "blocks.1.gain"])
    with raises(InputError, code="optimizer-state-mismatch", what="blocks.1.gain"):
        engine.load_optimizer_state(fewer, state)
