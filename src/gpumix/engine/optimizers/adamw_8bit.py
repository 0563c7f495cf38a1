"""AdamW whose moments are kept in 8 bits, with results that do not depend on how they are cut.

Blocks of 256 elements are quantised together, by the maps and rules of bitsandbytes' `AdamW8bit`:
each moment is a byte per element and a maximum per block, and small parameters keep fp32. The cuts
of a plan with `optimizer_state: 8bit` are between blocks. Every operation rounds once, so values
depend neither on the device nor on an element's place in a tensor.

Dettmers et al.: 8-bit Optimizers via Block-wise Quantization, https://arxiv.org/abs/2110.02861.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW

from gpumix.engine.optimizers.base import (
    Group,
    Parameters,
    StepOptimizer,
    flatten_gradient,
    flatten_piece,
)
from gpumix.engine.optimizers.eight_bit_map import QuantisedMoment
from gpumix.schema.errors import InputError
from gpumix.schema.plan.optimizer_state import LEAST_QUANTISED, QUANTISED_BLOCK

State = dict[str, Any]

MOMENTS = ("exp_avg", "exp_avg_sq")  # in fp32, as of torch's AdamW
CODES = ("exp_avg_codes", "exp_avg_sq_codes")
MAXIMA = ("exp_avg_max", "exp_avg_sq_max")
# Elements that are updated at once: temporaries take 32 bytes each.
CHUNK_ON_CPU = 2**16
CHUNK_ON_GPU = 2**20


class AdamW8bit(StepOptimizer):
    """AdamW with 8-bit state, for the pieces of an engine and for ordinary parameters.

    The plan has to be made for it: `optimizer_state: 8bit`. `block_states` are states with a value
    for each block of `block` elements.

    Args:
        params: parameters, named parameters, or groups of these.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        min_8bit_size: elements of the smallest parameter with state in 8 bits.
    """

    _unsupported = ("maximize", "amsgrad")
    block_states = frozenset(MAXIMA)
    block = QUANTISED_BLOCK

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        min_8bit_size: int = LEAST_QUANTISED,
    ) -> None:
        settings: Group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        AdamW([nn.Parameter(torch.empty(0))], **settings)  # checks the settings
        super().__init__(params, {**settings, "min_8bit_size": min_8bit_size})

    def _update(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update_parameter(p, group)

    def _update_parameter(self, p: nn.Parameter, group: Group) -> None:
        local, gradient = flatten_piece(p), flatten_gradient(p)
        state = self._state(p, group)
        state["step"] += 1
        step = _AdamStep.of(group, int(state["step"].item()))
        for part in _iterate_chunks(local):
            values = [_load(state, number, part) for number in range(2)]
            step.update(local[part], gradient[part].float(), *values)
            for number, value in enumerate(values):
                _store(state, number, part, value)

    def _state(self, p: nn.Parameter, group: Group) -> State:
        state: State = self.state[p]
        if state:
            return state
        state["step"] = torch.tensor(0.0)  # on the host, where it is used
        is_quantised = is_state_quantised(p, group)
        dtype = torch.uint8 if is_quantised else torch.float32
        for name in CODES if is_quantised else MOMENTS:
            state[name] = torch.zeros(p.shape, dtype=dtype, device=p.device)
        if is_quantised:
            blocks = -(-p.numel() // QUANTISED_BLOCK)
            for name in MAXIMA:
                state[name] = torch.zeros(blocks, device=p.device)
        return state

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state; torch would convert it to the parameters' dtype.

        Raises:
            InputError: it is of another optimizer, or of other parameters.
        """
        saved = state_dict["state"]
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = [(p, group) for group in self.param_groups for p in group["params"]]
        settings = [group for group in state_dict["param_groups"] for _ in group["params"]]
        loaded = list(zip(numbers, own, settings))
        for number, (p, group), setting in loaded:
            loaded_group = {**group, **setting, "params": group["params"]}
            self._check_group(loaded_group)
            _check_state(saved.get(number, {}), p, loaded_group)
        counts = {
            number: {key: value for key, value in states.items() if key == "step"}
            for number, states in saved.items()
        }
        groups = self.param_groups  # schedulers may hold them
        super().load_state_dict({**state_dict, "state": counts})
        for group, found in zip(groups, self.param_groups):
            group.update(found)
        self.param_groups = groups
        for number, (p, _), _ in loaded:
            for key, value in saved.get(number, {}).items():
                if key != "step":
                    self.state[p][key] = value.to(p.device)


def get_state_names(p: torch.Tensor, group: Group) -> tuple[str, ...]:
    """Return the names of a parameter's states."""
    return ("step", *CODES, *MAXIMA) if is_state_quantised(p, group) else ("step", *MOMENTS)


def _check_state(state: State, p: torch.Tensor, group: Group) -> None:
    """Check that a state to be loaded is one of AdamW8bit's."""
    needed = get_state_names(p, group)
    lacking = [name for name in needed if name not in state] if state else []
    if lacking:
        raise InputError(
            "the state to be loaded is of another optimizer, or of other parameters",
            code="optimizer-state-mismatch",
            why=f"for a parameter of shape {tuple(getattr(p, 'full_shape', p.shape))} AdamW8bit "
            f"has {', '.join(needed)}, and '{lacking[0]}' is missing",
            fix="load it into an optimizer like the one that made it",
        )


def is_state_quantised(p: torch.Tensor, group: Group) -> bool:
    """Return whether a parameter's moments are kept in 8 bits, by the size of the full
    parameter."""
    shape: torch.Size = getattr(p, "full_shape", p.shape)
    return shape.numel() >= int(group["min_8bit_size"])


def _iterate_chunks(local: torch.Tensor) -> Iterator[slice]:
    """Yield parts of whole blocks."""
    chunk = CHUNK_ON_CPU if local.device.type == "cpu" else CHUNK_ON_GPU
    for begin in range(0, local.numel(), chunk):
        yield slice(begin, min(begin + chunk, local.numel()))


def _load(state: State, number: int, part: slice) -> torch.Tensor:
    """Return a part of a moment in fp32; of a small parameter, the state itself."""
    if CODES[number] in state:
        return _moment(state, number, part).dequantise()
    found: torch.Tensor = state[MOMENTS[number]].view(-1)[part]
    return found


def _store(state: State, number: int, part: slice, value: torch.Tensor) -> None:
    if CODES[number] in state:
        _moment(state, number, part).quantise(value)


def _moment(state: State, number: int, part: slice) -> QuantisedMoment:
    blocks = slice(part.start // QUANTISED_BLOCK, -(-part.stop // QUANTISED_BLOCK))
    return QuantisedMoment(
        state[CODES[number]].view(-1)[part], state[MAXIMA[number]][blocks], signed=number == 0
    )


def _compute_root(values: torch.Tensor) -> torch.Tensor:
    """Return the square root, correctly rounded; torch's on CPUs is not, and goes by the place."""
    if values.device.type != "cpu":
        return values.sqrt()
    root = torch.empty_like(values)
    np.sqrt(values.numpy(), out=root.numpy())
    return root


@dataclass(frozen=True)
class _AdamStep:
    """Factors of a step of a group's parameters."""

    betas: tuple[float, float]
    eps: float
    decay: float
    scale: float
    root_scale: float

    @classmethod
    def of(cls, group: Group, step: int) -> _AdamStep:
        """Make the factors of `step`, counted from 1."""
        rate, (beta1, beta2) = float(group["lr"]), group["betas"]
        return cls(
            betas=(beta1, beta2),
            eps=group["eps"],
            decay=1.0 - rate * group["weight_decay"],
            scale=-rate / (1.0 - beta1**step),
            root_scale=1.0 / sqrt(1.0 - beta2**step),
        )

    def update(
        self, local: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor
    ) -> None:
        """Update moments and parameter in place. Each operation rounds once: fused ones round as
        the kernel does that an element's place in the tensor selects."""
        beta1, beta2 = self.betas
        mean.mul_(beta1).add_(gradient * (1.0 - beta1))
        square.mul_(beta2).add_((gradient * gradient).mul_(1.0 - beta2))
        root = _compute_root(square).mul_(self.root_scale).add_(self.eps)
        change = torch.div(mean, root, out=root).mul_(self.scale)
        if self.decay != 1.0:
            local.mul_(self.decay)
        local.add_(change)
