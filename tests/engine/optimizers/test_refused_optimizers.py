"""Optimizers that would compute something else on pieces: refused before they change anything."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import gpumix
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.training.checkpoints import checkpointer, odd
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import Share, batches, engine_alone, engine_for, pieces_of

GPT2 = ARCHITECTURES["gpt2"]


class Lamb(torch.optim.SGD):
    """As in several libraries."""


class OwnLamb(Lamb):
    pass


UNFIT = {
    "Adafactor": (
        torch.optim.Adafactor,
        {"code": "optimizer-not-elementwise", "what": "Adafactor", "why": "matrices"},
    ),
    "LBFGS": (torch.optim.LBFGS, {"code": "optimizer-not-elementwise", "what": "LBFGS"}),
    "OwnLamb": (OwnLamb, {"code": "optimizer-not-elementwise", "what": "OwnLamb"}),
    "own without a layout": (gpumix.Adafactor, {"code": "optimizer-without-layout"}),
    "Muon without a layout": (
        gpumix.Muon,
        {"code": "optimizer-without-layout", "fix": ("gpumix.Muon", "engine.layout")},
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_the_first_step_of_an_unfit_optimizer_changes_nothing(name):
    make, message = UNFIT[name]
    engine = engine_alone(GPT2.factory, 2, 1)
    optimizer = make(engine.parameters())
    engine.step(next(batches(GPT2, 2, 1)))
    before = [values.copy() for *_, values in pieces_of(engine)]
    with raises(InputError, **message):
        optimizer.step(lambda: 0.0)
    assert all((a == b).all() for a, (*_, b) in zip(before, pieces_of(engine)))
    assert not any(optimizer.state.values())


def test_checkpoints_refuse_it_before_any_step(tmp_path):
    engine = engine_for(odd, [Share(2, 1, 1)])
    checkpointer(tmp_path).save(0, engine, torch.optim.AdamW(engine.parameters()), cursor={})
    unfit = torch.optim.Adafactor(engine.parameters())
    for action in (
        lambda: engine.optimizer_state(unfit),
        lambda: engine.load_optimizer_state(unfit, {}),
        lambda: checkpointer(tmp_path).save(1, engine, unfit, cursor={}),
    ):
        with raises(
            InputError,
            code="optimizer-not-elementwise",
            fix=("gpumix.Adafactor", "engine.parameters"),
        ):
            action()


def test_other_optimizers_of_the_program_are_left_alone():
    engine = engine_alone(GPT2.factory, 2, 1)
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    torch.optim.Adafactor([parameter]).step()
    assert (parameter != 1).all()
    assert engine.steps == 0


def test_nothing_is_left_of_an_engine_that_is_gone():
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    engine = engine_alone(GPT2.factory, 2, 1)
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before + 1
    del engine
    gc.collect()
    assert len(torch_optimizer._global_optimizer_pre_hooks) <= before


def test_a_parameter_that_the_layout_does_not_know_is_refused():
    engine = engine_alone(GPT2.factory, 2, 1)
    for make in (gpumix.Adafactor, gpumix.Muon):
        with raises(InputError, code="parameters-not-in-layout", what=1):
            make([torch.nn.Parameter(torch.ones(3))], engine.layout())


# -- parameters and groups of our own ones ---------------------------------------------------------

OWN = [gpumix.AdamW8bit, gpumix.Adafactor, gpumix.Muon]


@pytest.mark.parametrize("kind", OWN)
def test_settings_of_a_group_that_would_be_ignored(kind):
    group = {"params": [torch.nn.Parameter(torch.ones(4, 4))], "maximize": True}
    with raises(InputError, code="optimizer-setting-unsupported", what=(kind.__name__, "maximize")):
        kind([group])


def test_settings_of_a_loaded_group_that_would_be_ignored():
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    theirs = torch.optim.AdamW([p], amsgrad=True)
    theirs.step()
    with raises(InputError, code="optimizer-setting-unsupported", what=("amsgrad", "AdamW8bit")):
        gpumix.AdamW8bit([p]).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("kind", OWN)
def test_complex_parameters(kind):
    with raises(InputError, code="parameters-complex"):
        kind([torch.nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))])


@pytest.mark.parametrize("kind", OWN)
def test_elements_that_are_not_in_order(kind):
    p = torch.nn.Parameter(torch.ones(4, 6).T)
    p.grad = torch.ones(6, 4)
    with raises(InputError, code="parameter-not-contiguous"):
        kind([{"params": [p]}]).step()
    p.data = p.data.contiguous()
    kind([{"params": [p]}]).step()
    assert (p < 1).all()


@pytest.mark.parametrize("kind", OWN)
def test_sparse_gradients(kind):
    table = torch.nn.Embedding(8, 4, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with raises(InputError, code="gradient-sparse"):
        kind(table.parameters()).step()


@pytest.mark.parametrize("kind", OWN)
def test_gradients_whose_elements_are_in_another_order(kind):
    made = []
    for in_order in (True, False):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(80, 70))
        slope = torch.randn(70, 80).T
        p.grad = slope.contiguous() if in_order else slope
        kind([{"params": [p]}]).step()
        made.append(p.detach())
    assert torch.equal(*made)
