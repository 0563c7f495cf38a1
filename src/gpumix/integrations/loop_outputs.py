"""What a model returns to a loop, of micro-batches that were computed one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gpumix.engine.reduction import SUM, ReducedLoss, Rule
from gpumix.integrations.called import ARGS, KWARGS
from gpumix.spec.errors import InputError


class Outputs(dict[str, Any]):
    """What a training call returns, whose backward has been done: the loss of the global batch."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__(loss=loss)
        self.loss = loss

    def __getitem__(self, key: Any) -> Any:
        """The loss by its place too."""
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
    """A sum over all that a model returns for a batch, which stands for whatever a loop makes of
    it: if the sum of a batch is not that of its parts, the model couples samples."""

    def __init__(self) -> None:
        def computed(model: nn.Module, batch: Any, *_: Any) -> Tensor:
            return sum_of(outputs_of(model, batch))

        super().__init__(computed, lambda batch: {})

    def rules(self, batch: Any) -> tuple[Rule, ...]:
        return (SUM,)


def outputs_of(model: nn.Module, batch: Any) -> Any:
    return model(*batch[ARGS], **batch[KWARGS])


def stand_in_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """While devices are measured: nobody knows yet what the loop will make of the outputs."""
    total = sum_of(outputs_of(model, batch))
    return total, torch.tensor(1, device=total.device)


def sum_of(outputs: Any) -> Tensor:
    """Of numbers as they are not lost beside masks, such as the smallest one that there is."""
    every = (torch.nan_to_num(own.float()).asinh().square() for own in differentiable(outputs))
    return torch.stack([own.sum() for own in every]).sum()


def has_loss(outputs: Any, *, labelled: bool = True) -> bool:
    """Whether a model returns one, by name, or as the first of what it returns for labels."""
    if isinstance(outputs, Mapping):
        return isinstance(outputs.get("loss"), Tensor)
    first = outputs[0] if labelled and isinstance(outputs, tuple | list) and outputs else None
    return isinstance(first, NotKept) or (isinstance(first, Tensor) and first.dim() == 0)


def loss_of(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(loss, Tensor):
        raise InputError(
            "the model was given labels, and returned no loss",
            fix="return it first, or as 'loss'; or call the model without labels, and compute the "
            "loss of its outputs",
        )
    return loss


def differentiable(outputs: Any) -> list[Tensor]:
    """Tensors that a loss may be computed of."""
    found = (one for one in tree_flatten(outputs)[0] if not isinstance(one, NotKept))
    return [one for one in found if is_float(one) and one.dim() > 0]


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def as_leaves(outputs: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The same as leaves of a graph, those that are `differentiable`, and those without dimensions,
    from which no gradient comes back."""
    leaves: list[Tensor] = []
    numbers: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, NotKept) or not is_float(value):
            return value
        made = value.detach().requires_grad_()
        (leaves if made.dim() else numbers).append(made)
        return made

    return tree_map(leaf, outputs), leaves, numbers


def joined(outputs: Sequence[Any]) -> Any:
    """What several micro-batches returned, as one; a number that each of them has for itself is
    `NotKept` where they are unlike."""
    flat, (_, spec) = [tree_flatten(one)[0] for one in outputs], tree_flatten(outputs[0])
    return tree_unflatten([_together(values) for values in zip(*flat)], spec)


def _together(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.dim() > 0:
        if any(one.shape[1:] != first.shape[1:] for one in values):
            raise InputError(
                "what the model returns is not a row for each sample",
                why=f"of one micro-batch it has shape {tuple(first.shape)}, of another one "
                f"{tuple(next(v.shape for v in values if v.shape[1:] != first.shape[1:]))}",
                fix="return rows, or train by a plan that does not cut batches",
            )
        return torch.cat(list(values)) if len(values) > 1 else first
    is_number = isinstance(first, Tensor | int | float)
    return NotKept.made() if is_number and any(first != one for one in values) else first


class NotKept(Tensor):
    """In place of a number that a model returned, other ones for other micro-batches: whoever uses
    it is told so."""

    @classmethod
    def made(cls) -> Tensor:
        return Tensor._make_subclass(cls, torch.zeros(()))

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise InputError(
            "a number that the model returned is not known",
            why="a batch is computed in micro-batches, each with a number of its own",
            fix="if it is a loss, give the model its labels by that name, model(..., "
            "labels=labels); else let it return the number for each sample",
        )


def with_loss(outputs: Any, loss: Tensor) -> Any:
    """The same with another loss."""
    if isinstance(outputs, Mapping):
        changed: Any = outputs
        changed["loss"] = loss
        return changed
    flat, spec = tree_flatten(outputs)
    return tree_unflatten([loss, *flat[1:]], spec)


def without_rows(outputs: Any) -> Any:
    """The same of no samples."""

    def none_of(own: Any) -> Any:
        has_rows = isinstance(own, Tensor) and not isinstance(own, NotKept) and own.dim()
        return own[:0] if has_rows else own

    return tree_map(none_of, outputs)
