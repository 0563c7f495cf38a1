"""Optimizers that cannot update pieces are refused before anything is measured, with what a program
that has no engine in its hands can do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from gpumix.integrations.optimizers import like, optimizer_like
from gpumix.spec.errors import InputError


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
    with pytest.raises(InputError, match="Adafactor cannot update a sharded model") as caught:
        like(of_arguments(Adafactor))
    assert caught.value.fix.startswith('optim="adamw_torch"')
    made = like(of_arguments(torch.optim.RMSprop))([nn.Parameter(torch.ones(2))])
    assert isinstance(made, torch.optim.RMSprop)


def test_of_a_loop():
    with pytest.raises(InputError, match="Adafactor cannot update a sharded model") as caught:
        optimizer_like(torch.optim.Adafactor([nn.Parameter(torch.ones(2, 2))]))
    assert caught.value.fix.startswith("torch.optim.AdamW")
