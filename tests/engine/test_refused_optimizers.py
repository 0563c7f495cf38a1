"""Optimizers that would compute something else on pieces: refused before they change anything."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import gpumix
from checkpoints import checkpointer, odd
from gpumix.schema.errors import InputError
from models import ARCHITECTURES
from reference import Share, batches, engine_alone, engine_for, pieces_of

GPT2 = ARCHITECTURES["gpt2"]


class Lamb(torch.optim.SGD):
    """As in several libraries."""


class OwnLamb(Lamb):
    pass


UNFIT = {
    "Adafactor": (torch.optim.Adafactor, r"torch.optim.*Adafactor cannot .*\n.*matrices"),
    "LBFGS": (torch.optim.LBFGS, r"LBFGS cannot update a sharded model\n  why: .*all parameters"),
    "OwnLamb": (OwnLamb, "OwnLamb cannot update a sharded model\n  why: it goes by the norms"),
    "own without a layout": (gpumix.Adafactor, "Adafactor was made without the engine's layout"),
    "Muon without a layout": (gpumix.Muon, r"fix: gpumix.Muon\(engine.parameters\(\), engine.lay"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_the_first_step_of_an_unfit_optimizer_changes_nothing(name):
    make, message = UNFIT[name]
    engine = engine_alone(GPT2.factory, 2, 1)
    optimizer = make(engine.parameters())
    engine.step(next(batches(GPT2, 2, 1)))
    before = [values.copy() for *_, values in pieces_of(engine)]
    with pytest.raises(InputError, match=message):
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
        with pytest.raises(InputError, match=r"fix: gpumix.Adafactor\(engine.parameters\(\)"):
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
        with pytest.raises(InputError, match=r"1 parameter\(s\) that are not in its layout"):
            make([torch.nn.Parameter(torch.ones(3))], engine.layout())
