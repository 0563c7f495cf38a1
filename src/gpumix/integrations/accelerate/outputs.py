"""Outputs of a model for a loop, computed micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gpumix.engine.loss.reduction import SUM, ReducedLoss, ReductionRule
from gpumix.integrations.accelerate.call_signature import ARGS, KWARGS
from gpumix.schema.errors import InputError


class LoopOutputs(dict[str, Any]):
    """Outputs of a training call with the backward already done: the loss of the global batch."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__(loss=loss)
        self.loss = loss

    def __getitem__(self, key: Any) -> Any:
        """Return an entry; index 0 is the loss too."""
        if key == 0:
            return self.loss
        if isinstance(key, str) and key in self:
            return super().__getitem__(key)
        raise KeyError(_not_kept(key))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_not_kept(name))


def _not_kept(name: Any) -> str:
    return (
        f"{name!r} is not kept while training: the batch went through the model in micro-"
        "batches, forward and backward; call the model in eval mode for it"
    )


class SumOfOutputs(ReducedLoss):
    """Sum over all outputs of a batch, a stand-in for the loop's loss: if the sum of a batch is not
    the sum of its parts, the model couples samples."""

    def __init__(self) -> None:
        def computed(model: nn.Module, batch: Any, *_: Any) -> Tensor:
            return sum_outputs(call_model(model, batch))

        super().__init__(computed, lambda batch: {})

    def rules(self, batch: Any) -> tuple[ReductionRule, ...]:
        return (SUM,)


def call_model(model: nn.Module, batch: Any) -> Any:
    return model(*batch[ARGS], **batch[KWARGS])


def stand_in_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Compute a stand-in loss for measuring devices: the loop's use of the outputs is not known
    yet."""
    total = sum_outputs(call_model(model, batch))
    return total, torch.tensor(1, device=total.device)


def sum_outputs(outputs: Any) -> Tensor:
    """Sum outputs on a scale that keeps numbers visible next to masks, such as the smallest
    float."""
    every = (torch.nan_to_num(own.float()).asinh().square() for own in find_float_tensors(outputs))
    return torch.stack([own.sum() for own in every]).sum()


def has_loss(outputs: Any, *, labelled: bool = True) -> bool:
    """Return True if a model returns a loss: by name, or first in its outputs for labels."""
    if isinstance(outputs, Mapping):
        return isinstance(outputs.get("loss"), Tensor)
    first = outputs[0] if labelled and isinstance(outputs, tuple | list) and outputs else None
    return isinstance(first, VaryingNumber) or (isinstance(first, Tensor) and first.dim() == 0)


def loss_of(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(loss, Tensor):
        raise InputError(
            "the model was given labels, and returned no loss",
            code="model-returned-no-loss",
            fix="return it first, or as 'loss'; or call the model without labels, and compute the "
            "loss of its outputs",
        )
    return loss


def find_float_tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors that a loss may be computed from."""
    found = (one for one in tree_flatten(outputs)[0] if not isinstance(one, VaryingNumber))
    return [one for one in found if is_float(one) and one.dim() > 0]


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def detach_to_leaves(outputs: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Return outputs as leaves of a new graph, the `find_float_tensors` leaves, and the leaves
    without dimensions, which return no gradient."""
    leaves: list[Tensor] = []
    numbers: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, VaryingNumber) or not is_float(value):
            return value
        made = value.detach().requires_grad_()
        (leaves if made.dim() else numbers).append(made)
        return made

    return tree_map(leaf, outputs), leaves, numbers


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches; a number differing between micro-batches becomes
    `VaryingNumber`."""
    flat, (_, spec) = [tree_flatten(one)[0] for one in outputs], tree_flatten(outputs[0])
    return tree_unflatten([_join_values(values) for values in zip(*flat)], spec)


def _join_values(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.dim() > 0:
        if any(one.shape[1:] != first.shape[1:] for one in values):
            raise InputError(
                "what the model returns is not a row for each sample",
                code="output-not-per-sample",
                why=f"of one micro-batch it has shape {tuple(first.shape)}, of another one "
                f"{tuple(next(v.shape for v in values if v.shape[1:] != first.shape[1:]))}",
                fix="return rows, or train by a plan that does not cut batches",
            )
        return torch.cat(list(values)) if len(values) > 1 else first
    is_number = isinstance(first, Tensor | int | float)
    return VaryingNumber.made() if is_number and any(first != one for one in values) else first


class VaryingNumber(Tensor):
    """Placeholder for a returned number that differs between micro-batches: any use raises an
    error."""

    @classmethod
    def made(cls) -> Tensor:
        return Tensor._make_subclass(cls, torch.zeros(()))

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise InputError(
            "a number that the model returned is not known",
            code="output-number-unknown",
            why="a batch is computed in micro-batches, each with a number of its own",
            fix="if it is a loss, give the model its labels by that name, model(..., "
            "labels=labels); else let it return the number for each sample",
        )


def with_loss(outputs: Any, loss: Tensor) -> Any:
    """Return outputs with another loss."""
    if isinstance(outputs, Mapping):
        changed: Any = outputs
        changed["loss"] = loss
        return changed
    flat, spec = tree_flatten(outputs)
    return tree_unflatten([loss, *flat[1:]], spec)


def take_zero_rows(outputs: Any) -> Any:
    """Return outputs with zero rows."""

    def none_of(own: Any) -> Any:
        has_rows = isinstance(own, Tensor) and not isinstance(own, VaryingNumber) and own.dim()
        return own[:0] if has_rows else own

    return tree_map(none_of, outputs)
