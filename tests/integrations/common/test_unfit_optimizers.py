"""Optimizers that cannot update pieces are refused before anything is measured, with what a program
that has no engine in its hands can do."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from transformers.optimization import Adafactor

import gpumix
from gpumix.integrations.common.optimizer_adapter import (
    make_factory_from_optimizer,
    make_factory_from_trainer,
)
from gpumix.integrations.common.plan_and_shard import TrainingSetup, _restrict_space
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import EVERYTHING, Space
from helpers.errors import raises


def of_arguments(kind: type) -> SimpleNamespace:
    """What is asked of a trainer whose `optim` means this class."""
    return SimpleNamespace(
        optimizer=None,
        optimizer_cls_and_kwargs=None,
        args=None,
        model=None,
        get_optimizer_cls_and_kwargs=lambda args, model: (kind, {"lr": 0.1}),
    )


def test_of_a_trainers_arguments():
    with raises(InputError, code="optimizer-not-elementwise") as caught:
        make_factory_from_trainer(of_arguments(Adafactor))
    assert caught.value.fix.startswith('optim="adamw_torch"')
    assert "optimizers=(gpumix.Adafactor(model.parameters()), None)" in caught.value.fix
    made = make_factory_from_trainer(of_arguments(torch.optim.RMSprop))(
        [nn.Parameter(torch.ones(2))]
    )
    assert isinstance(made, torch.optim.RMSprop)


def test_plans_for_optimizers_of_blocks_are_without_tensor_parallel_groups():
    def allowed(kind: type) -> Space:
        made = kind([nn.Parameter(torch.ones(2, 2))])
        return _restrict_space(
            TrainingSetup(lambda n: None, 12, 4, optimizer=make_factory_from_optimizer(made))
        )

    assert allowed(gpumix.AdamW8bit) == EVERYTHING.without_tensor_parallel()
    for kind in (gpumix.Adafactor, gpumix.Muon, torch.optim.AdamW):
        assert allowed(kind) == EVERYTHING
    assert _restrict_space(TrainingSetup(lambda n: None, 12, 4)) == EVERYTHING


def test_of_a_loop():
    with raises(InputError, code="optimizer-not-elementwise") as caught:
        make_factory_from_optimizer(torch.optim.Adafactor([nn.Parameter(torch.ones(2, 2))]))
    assert caught.value.fix.startswith("torch.optim.AdamW")
