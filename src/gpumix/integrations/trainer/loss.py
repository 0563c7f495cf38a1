"""The loss that a trainer computes of a micro-batch, as a sum and a count.

It comes from `compute_loss`, so from whatever a subclass or the user makes of it: a mean over the
labels that count, or over samples where there are no labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from gpumix.engine.head import expected_gradient
from gpumix.engine.objective import IGNORED_LABEL, counted_labels

LABELS, SHIFTED = "labels", "shift_labels"
COLLECTIVES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


def loss_of(trainer: Any, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(summed loss, count) of a micro-batch."""
    (loss, _), count = with_outputs(trainer, model, batch, wants_outputs=False)
    return loss.float() * count, count


def with_outputs(
    trainer: Any, model: nn.Module, batch: Mapping[str, Any], *, wants_outputs: bool
) -> tuple[tuple[Tensor, Any], Tensor]:
    """What `compute_loss` makes of a micro-batch, a mean, and what it is a mean over."""
    batch = dict(batch)
    count = _count(model, batch)
    labels = batch.get(LABELS)
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        # Without any label a mean would be 0 / 0; with some other label it is finite, and counts 0.
        batch[LABELS] = torch.where(count > 0, labels, torch.zeros_like(labels))
    items = count.clamp(min=1) if _wants_items(trainer, labels) else None
    with expected_gradient(count) as expected:
        made = trainer.compute_loss(
            model, batch, return_outputs=wants_outputs, num_items_in_batch=items
        )
        loss, outputs = made if wants_outputs else (made, None)
        expected.settle(loss)
    return (loss, outputs), count


def _wants_items(trainer: Any, labels: Any) -> bool:
    """Whether a function of the user's is told how many labels there are, as by transformers. A
    model that takes the number gives the same mean without."""
    own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
    told = trainer.compute_loss_func or (own and trainer.model_accepts_loss_kwargs)
    return bool(told) and labels is not None


def _count(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    for name in (SHIFTED, LABELS):
        labels = batch.get(name)
        if isinstance(labels, Tensor):
            counted = labels if name == SHIFTED else counted_labels(model, labels)
            return (counted != IGNORED_LABEL).sum()
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    return torch.tensor(len(tensors[0]) if tensors else 0, device=tensors[0].device)


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
