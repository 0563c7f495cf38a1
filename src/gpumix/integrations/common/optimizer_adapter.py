"""Optimizers of other programs, updating a rank's shards instead of full parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gpumix.engine.engine import Engine
from gpumix.engine.optimizers.adamw_8bit import AdamW8bit
from gpumix.engine.optimizers.base import FullParameterOptimizer
from gpumix.engine.optimizers.elementwise_check import check_optimizer_class
from gpumix.profiler.subject import OptimizerOf
from gpumix.schema.errors import InputError

FIX_OTHER_OPTIMIZER = (
    'optim="adamw_torch", or another that treats elements one by one; or '
    "Trainer(..., optimizers=(gpumix.Adafactor(model.parameters()), None)), or gpumix.Muon"
)


def make_factory_from_trainer(trainer: Any) -> OptimizerOf:
    """Return a factory of optimizers like the trainer's future optimizer, for measurements.

    Raises:
        InputError: the kind of optimizer cannot update shards of a model.
    """
    if trainer.optimizer is not None:
        return make_factory_from_optimizer(trainer.optimizer)
    if trainer.optimizer_cls_and_kwargs is not None:
        kind, settings = trainer.optimizer_cls_and_kwargs
    else:
        kind, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    check_optimizer_class(kind, FIX_OTHER_OPTIMIZER)
    return partial(_make_optimizer, kind, settings)


def make_factory_from_optimizer(optimizer: Optimizer) -> OptimizerOf:
    """Return a factory of optimizers like `optimizer`, for measurements.

    Raises:
        InputError: the kind of optimizer cannot update shards of a model.
    """
    optimizer = convert_optimizer(optimizer)
    kind = type(optimizer)
    check_optimizer_class(kind, "torch.optim.AdamW, or another that treats elements one by one")
    return partial(_make_optimizer, kind, _settings_of(optimizer))


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the arguments that an optimizer was made with, apart from its parameters."""
    known = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def _make_optimizer(
    kind: Any, settings: Mapping[str, Any], parameters: list[nn.Parameter]
) -> Optimizer:
    made: Optimizer = kind(parameters, **settings)
    return made


def convert_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return `optimizer`; in place of bitsandbytes' AdamW in 8 bits one that fits any plan. It has
    the same parameter groups, which a scheduler changes."""
    kind, settings = type(optimizer), getattr(optimizer, "args", None)
    is_adamw = kind.__name__.removeprefix("Paged").removesuffix("8bit") in ("Adam", "AdamW")
    if (
        kind.__module__.partition(".")[0] != "bitsandbytes"
        or not is_adamw
        or getattr(settings, "optim_bits", 32) != 8
        or getattr(settings, "max_unorm", 0.0)
    ):
        return optimizer
    least = {"min_8bit_size": settings.min_8bit_size}  # type: ignore[union-attr]
    for group in optimizer.param_groups:
        group.update(least)
    made = AdamW8bit([nn.Parameter(torch.empty(0))], **_settings_of(optimizer), **least)
    made.param_groups, made.state = optimizer.param_groups, optimizer.state
    made.register_step_post_hook(lambda *_: setattr(optimizer, "_opt_called", True))
    return made


def take_over_optimizer(
    optimizer: Optimizer, engine: Engine, names: Mapping[int, str]
) -> Optimizer:
    """Make an optimizer of a model's parameters update this rank's shards instead; return it, or
    what takes its place. Collective.

    Args:
        names: of the full parameters, by `id`.

    Raises:
        InputError: the optimizer updates other tensors, has updated already, or does not fit the
            plan.
    """
    optimizer = convert_optimizer(optimizer)
    pieces: dict[str, list[nn.Parameter]] = {}
    for name, piece in engine.named_parameters():  # a rank may have several shards of a parameter
        pieces.setdefault(name, []).append(piece)
    ours = {id(piece) for of_name in pieces.values() for piece in of_name}
    if all(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
        return optimizer
    has_updated = any(one.get("step", 1) > 0 for one in optimizer.state.values())
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown or has_updated:
            raise InputError(
                "the optimizer cannot be taken over",
                code="optimizer-not-replaceable",
                why="it has state of updates already"
                if has_updated
                else "it updates tensors that are no parameters of the model",
                fix="make it of the model's parameters, and hand it over before it is used",
            )
        own = [pieces.get(names[id(p)], []) for p in group["params"]]
        group["params"] = [piece for of_name in own for piece in of_name]
    if optimizer.state:  # some kinds, such as Adagrad, have state before the first update
        groups = [dict(group) for group in optimizer.param_groups]
        optimizer.state = type(optimizer)(groups, **_settings_of(optimizer)).state
    if isinstance(optimizer, FullParameterOptimizer):
        optimizer.layout = engine.layout()
    engine.check_optimizer(optimizer)
    return optimizer
