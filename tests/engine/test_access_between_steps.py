"""A sharded model between steps, and after them: called, read, changed, made plain again.

The truth is the same model trained by plain PyTorch.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gpumix
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.known_losses import known_loss
from helpers.training.models import mean_loss
from helpers.training.reference import (
    Share,
    batches,
    engine_alone,
    engine_for,
    initialised,
    optimizer_for,
    own_rows,
    plan_for,
)
from helpers.training.staging import (
    EVERY,
    LLAMAS_ENDS,
    Row,
    own_samples,
    run_in_turn,
    staged_engine,
    staged_plan,
)

STEPS = 2
SHARES = [Share(3, 2, 1), Share(2, 1, 2)]


def trained(name: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A model of plain PyTorch after some steps, and the last gradients."""
    model = initialised(EVERY[name].factory)
    optimizer = optimizer_for(model.parameters())
    for batch in batches(EVERY[name], 5, STEPS):
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
    return model, [{name: p.grad for name, p in model.named_parameters()}]


def output(model: nn.Module, name: str) -> Any:
    batch = next(batches(EVERY[name], 2, 1))
    model.eval()
    with torch.no_grad():
        found = model(**batch)
    return (found[0] if isinstance(found, tuple) else found.logits).numpy()


def train(engine: Any, name: str, rows: Any) -> torch.optim.Optimizer:
    optimizer = optimizer_for(engine.parameters())
    for batch in batches(EVERY[name], 5, STEPS):
        optimizer.zero_grad()
        engine.step(rows(batch))
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("zero_stage", left_out([0, 2, 3], [0, 2]))
def test_of_one_process_it_is_an_ordinary_model_at_any_time(zero_stage):
    """Weights, gradients, outputs and the state dict; a copy is a model of its own."""
    model, (gradients,) = trained("gpt2")
    engine = engine_alone(EVERY["gpt2"].factory, 5, 2, zero_stage=zero_stage)
    train(engine, "gpt2", lambda batch: batch)
    ours = engine.model
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter, model.get_parameter(name), atol=1e-6), name
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-6), name
    assert np.allclose(output(ours, "gpt2"), output(model, "gpt2"), atol=1e-5)
    state = model.state_dict()
    assert ours.state_dict().keys() == state.keys()
    assert all(torch.allclose(v, state[n], atol=1e-6) for n, v in ours.state_dict().items())
    twin = copy.deepcopy(nn.ModuleList([ours.transformer.wte]))
    twin[0].weight.sum().backward()
    assert twin[0].weight.grad is not None


def test_what_is_changed_of_its_weights_is_trained_on():
    engine = engine_alone(EVERY["gpt2"].factory, 2, 1, zero_stage=3)
    batch = next(batches(EVERY["gpt2"], 2, 1))
    with torch.no_grad():
        engine.model.lm_head.weight.zero_()
    model = initialised(EVERY["gpt2"].factory)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert engine.step(batch).item() == pytest.approx(mean_loss(model, batch).item(), rel=1e-6)


def test_in_bf16_it_has_the_weights_that_are_updated():
    engine = engine_alone(EVERY["gpt2"].factory, 5, 2, compute_dtype="bf16")
    optimizer = train(engine, "gpt2", lambda batch: batch)
    weight = engine.model.transformer.wte.weight
    assert weight.dtype == torch.float32
    (piece,) = (p for p in engine.pieces() if p.name == "transformer.wte.weight")
    assert torch.equal(weight.flatten(), piece.local)
    optimizer.zero_grad()
    assert weight.grad is None


def test_parameters_that_are_frozen_between_steps_are_refused():
    engine = engine_alone(EVERY["gpt2"].factory, 2, 1)
    engine.model.lm_head.weight.requires_grad_(False)
    with raises(InputError, code="parameter-replaced"):
        engine.step(next(batches(EVERY["gpt2"], 2, 1)))


def test_a_backward_pass_of_somebody_else_is_refused():
    engine = engine_alone(EVERY["gpt2"].factory, 2, 1)
    batch = next(batches(EVERY["gpt2"], 2, 1))
    mean_loss(engine.model, batch).backward()
    with raises(InputError, code="gradient-from-outside"):
        engine.step(batch)


@pytest.mark.parametrize("zero_stage", left_out([0, 3], [0]))
def test_nothing_is_held_when_the_engine_is_gone(zero_stage):
    """Not even until garbage is collected; and a model that is kept is still one."""
    gc.disable()
    try:
        engine = engine_alone(EVERY["gpt2"].factory, 2, 1, zero_stage=zero_stage)
        engine.step(next(batches(EVERY["gpt2"], 2, 1)))
        kept, engine_itself = engine.model, weakref.ref(engine)
        expected = output(kept, "gpt2")
        del engine
        assert engine_itself() is None
        assert np.array_equal(output(kept, "gpt2"), expected)
        gpumix.unshard(kept)
        assert np.array_equal(output(kept, "gpt2"), expected)
        model_itself = weakref.ref(kept)
        del kept
        assert model_itself() is None
    finally:
        gc.enable()


def test_a_step_is_refused_while_the_model_is_whole():
    engine = engine_alone(EVERY["gpt2"].factory, 2, 1, zero_stage=3)
    batch = next(batches(EVERY["gpt2"], 2, 1))
    with (
        gpumix.summon_full_params(engine.model),
        raises(InputError, code="step-inside-summon-full-params", what="gpumix.summon_full_params"),
    ):
        engine.step(batch)
    assert engine.step(batch).isfinite()


def test_one_process_trains_on_as_an_ordinary_model():
    model, _ = trained("gpt2")
    engine = engine_alone(EVERY["gpt2"].factory, 5, 2, zero_stage=3)
    train(engine, "gpt2", lambda batch: batch)
    ours = engine.model
    gpumix.unshard(ours)
    assert all(type(p) is nn.Parameter for p in ours.parameters())
    assert not any("forward" in vars(module) for module in ours.modules())
    assert ours.lm_head.weight is ours.transformer.wte.weight
    batch = next(batches(EVERY["gpt2"], 2, 1))
    losses = [mean_loss(one, batch) for one in (ours, model)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    losses[0].backward()
    assert ours.lm_head.weight.grad is not None
    with raises(gpumix.GpumixError, code="engine-ended"):
        engine.step(batch)


def _prepared_unlike() -> float:
    torch.manual_seed(torch.distributed.get_rank())
    model = EVERY["gpt2"].factory()
    engine = gpumix.prepare(model, plan_for(model, SHARES, zero_stage=3), loss=known_loss(model))
    with raises(gpumix.GpumixError, code="gradient-of-piece-read", fix="clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of pieces, not of all gradients
    with gpumix.summon_full_params(model):
        return model.transformer.wte.weight.detach().sum().item() + 0 * engine.steps


def test_ranks_that_begin_with_unlike_weights_take_those_of_the_first():
    torch.manual_seed(0)
    expected = EVERY["gpt2"].factory().transformer.wte.weight.sum().item()
    assert run_ranks(_prepared_unlike, 2) == pytest.approx([expected] * 2, rel=1e-6)


def _use(name: str, settings: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    engine = engine_for(EVERY[name].factory, SHARES, **settings)
    train(engine, name, lambda batch: own_rows(batch, SHARES, engine.comm.rank))
    model = engine.model
    called = output(model, name)
    prompt = next(batches(EVERY[name], 2, 1))["input_ids"][:, :3]
    # The ranks' samples end at different times.
    more = {"max_new_tokens": 3 + engine.comm.rank, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(input_ids=prompt, **more).numpy()
    with gpumix.summon_full_params(model):
        tokens = model.get_input_embeddings().weight
        norm = tokens.detach().norm().item()
        inside = output(model, name)
        with torch.no_grad():
            tokens.mul_(2)
    gpumix.unshard(model)
    doubled = model.get_input_embeddings().weight.detach().norm().item()
    return called, generated, inside, (norm, doubled)


CALLED: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"zero_stage": 0}),
    ("gpt2", {"zero_stage": 3}),
    ("llama", {"zero_stage": 3, "stage": LLAMAS_ENDS}),  # whose buffers are shared with blocks
]


@pytest.mark.parametrize(
    ("name", "settings"),
    left_out(CALLED, CALLED[:1]),
    ids=["whole", "sharded", "with ends apart"],
)
def test_ranks_call_it_together(name, settings):
    """Called, generating, whole, changed, and plain again."""
    model, _ = trained(name)
    prompt = next(batches(EVERY[name], 2, 1))["input_ids"][:, :3]
    for rank, (called, generated, inside, norms) in enumerate(run_ranks(_use, 2, name, settings)):
        assert np.allclose(called, output(model, name), atol=1e-5)
        assert np.allclose(inside, called, atol=1e-5)
        expected = model.generate(
            input_ids=prompt, max_new_tokens=3 + rank, do_sample=False, pad_token_id=0
        )
        assert np.array_equal(generated, expected.numpy())
        norm = model.get_input_embeddings().weight.detach().norm().item()
        assert norms == pytest.approx((norm, 2 * norm), rel=1e-5)


def _use_in_stages(plan_json: str, name: str) -> tuple[Any, Any, str]:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine(name, plan)
    train(engine, name, lambda batch: own_samples(plan, engine.comm.rank, batch))
    with raises(ModelError, code="model-called-between-steps") as refused:
        output(engine.model, name)
    with gpumix.summon_full_params(engine.model):
        inside = output(engine.model, name)
    train(engine, name, lambda batch: own_samples(plan, engine.comm.rank, batch))
    gpumix.unshard(engine.model)
    return inside, output(engine.model, name), refused.value.fix


PLANS = {
    "stages": [Row((Share(5, 1, 1),), (0,)), Row((Share(5, 1, 1),), (1,))],
    "a TP group": [Row((Share(5, 2, 1),) * 2, (0, 1), tensor=2)],
}


@pytest.mark.parametrize("kind", left_out(PLANS, ["stages"]))
def test_by_stages_and_tp_groups_it_is_called_when_it_is_whole(kind):
    model, _ = trained("llama")
    plan = staged_plan("llama", PLANS[kind], zero_stage=0)
    found = run_in_turn(_use_in_stages, {kind: (plan, ("llama",))})[kind]
    expected = output(model, "llama")
    optimizer = optimizer_for(model.parameters())
    for batch in batches(EVERY["llama"], 5, STEPS):
        optimizer.zero_grad()
        mean_loss(model.train(), batch).backward()
        optimizer.step()
    for inside, plain, fix in found:
        assert np.allclose(inside, expected, atol=1e-5)
        assert np.allclose(plain, output(model, "llama"), atol=1e-5)
        assert "gpumix.summon_full_params" in fix


@pytest.mark.parametrize("on_host", [(), (0,)])
def test_a_sharded_model_cannot_be_pickled_and_says_so(on_host):
    engine = engine_alone(EVERY["gpt2"].factory, 2, 2, on_host=on_host)
    with raises(InputError, code="sharded-model-pickled"):
        pickle.dumps(engine.model)
