"""The loss that a trainer computes of a micro-batch, as a sum and a count.

It comes from `compute_loss`, so from whatever a subclass or the user makes of it: a mean over the
labels that count, or over samples where there are no labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from gpumix.engine.head import expected_gradient
from gpumix.engine.objective import IGNORED_LABEL, number_of_labels

LABELS, SHIFTED = "labels", "shift_labels"
COLLECTIVES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


@dataclass(frozen=True)
class Computed:
    """Of a micro-batch: the sum of its losses, the number that the sum of all is divided by, what
    the model returned."""

    loss: Tensor
    count: Tensor
    outputs: Any


def loss_of(trainer: Any, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(summed loss, count) of a micro-batch."""
    found = compute(trainer, model, batch, wants_outputs=False)
    return found.loss, found.count


def compute(
    trainer: Any, model: nn.Module, batch: Mapping[str, Any], *, wants_outputs: bool
) -> Computed:
    """What `compute_loss` makes of a micro-batch."""
    batch = dict(batch)
    labels = batch.get(LABELS)
    own, told = _counts(trainer, model, batch)
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        # Without any label a mean would be 0 / 0; with some other label it is finite, and counts 0.
        batch[LABELS] = torch.where(own > 0, labels, torch.zeros_like(labels))
    items = own.clamp(min=1) if _wants_items(trainer, labels) else None
    with expected_gradient(own) as expected:
        made = trainer.compute_loss(
            model, batch, return_outputs=wants_outputs, num_items_in_batch=items
        )
        loss, outputs = made if wants_outputs else (made, None)
        expected.settle(loss)
    return Computed(loss.float() * own, told, outputs)


def _wants_items(trainer: Any, labels: Any) -> bool:
    """Whether a function of the user's is told how many labels there are, as by transformers. A
    model that takes the number gives the same mean without."""
    own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
    told = trainer.compute_loss_func or (own and trainer.model_accepts_loss_kwargs)
    return bool(told) and labels is not None


def _counts(trainer: Any, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Over how many labels, or samples, the loss is a mean, and for how many transformers counts
    them: of models whose class does not say that their labels are shifted it counts the first of
    each sample too."""
    labels, shifted = batch.get(LABELS), batch.get(SHIFTED)
    if isinstance(shifted, Tensor):
        return _counted(shifted), _counted(shifted)
    if isinstance(labels, Tensor):
        own = number_of_labels(model, labels)
        all_told = trainer.model_accepts_loss_kwargs and not trainer._loss_shifts_labels
        return own, _counted(labels) if all_told else own
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    samples = torch.full((), len(tensors[0]), device=tensors[0].device)
    return samples, samples


def _counted(labels: Tensor) -> Tensor:
    return (labels != IGNORED_LABEL).sum()


@contextmanager
def by_itself(accelerator: Any) -> Iterator[None]:
    """Inside, what would be gathered from all ranks is this one's: ranks compute unlike numbers of
    micro-batches, so what each computes of one must not wait for the others."""
    for name in COLLECTIVES:
        setattr(accelerator, name, _same)
    try:
        yield
    finally:
        for name in COLLECTIVES:
            delattr(accelerator, name)


def _same(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value
