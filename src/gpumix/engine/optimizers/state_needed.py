"""State of a parameter required for an optimizer step, once there is any."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from gpumix.engine.optimizers.adafactor import Adafactor, get_average_shapes
from gpumix.engine.optimizers.adamw_8bit import MAXIMA, AdamW8bit, get_state_names
from gpumix.engine.optimizers.base import Group
from gpumix.engine.optimizers.muon import Muon
from gpumix.engine.sharding.parameter_slice import ParameterSlice


def get_required_state(
    optimizer: Optimizer, group: Group, p: nn.Parameter
) -> dict[str, torch.Size | None]:
    """Return the names of the states of `p` in `group`, with shapes of states that are not sharded
    like it. Empty for unknown optimizers, and for optimizers that recreate missing state."""
    if isinstance(optimizer, Adafactor):
        return {"step": None, **get_average_shapes(optimizer.layout.piece(p).shape)}
    if isinstance(optimizer, AdamW8bit):
        moments: dict[str, torch.Size | None] = dict.fromkeys(get_state_names(p, group))
        if moments.keys() >= set(MAXIMA):
            full = ParameterSlice(getattr(p, "full_shape", p.shape))
            moments |= dict.fromkeys(MAXIMA, full.of_blocks(optimizer.block).shape)
        return moments
    if isinstance(optimizer, Muon):
        is_adam = not group["use_muon"]
    else:
        is_adam = type(optimizer) in (Adam, AdamW)
    if not is_adam:
        return {}
    largest = ["max_exp_avg_sq"] if group.get("amsgrad") else []
    return dict.fromkeys(["step", "exp_avg", "exp_avg_sq", *largest])
