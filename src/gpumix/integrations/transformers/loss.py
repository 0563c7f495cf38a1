"""Loss of a trainer's micro-batch, as a sum and a count.

`compute_loss` makes the loss, including any override by a subclass or user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import transformers
from accelerate import PartialState
from torch import Tensor, nn

from gpumix.engine.batch.batch_split import IGNORED_LABEL, LABELS, count_samples
from gpumix.engine.batch.ragged_batch import to_model_inputs
from gpumix.engine.loss.reduction import ReducedLoss, integer_labels
from gpumix.integrations.transformers.step_logs import collect_logs

ITEMS, SHIFTED = "num_items_in_batch", "shift_labels"
GATHERING_METHODS = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


@dataclass(frozen=True)
class LossAndOutputs:
    """Sum of losses of a micro-batch, its count for the denominator of the total, and the model's
    outputs."""

    loss: Tensor
    count: Tensor
    outputs: Any


class TrainerLoss(ReducedLoss):
    """Loss of a micro-batch by `compute_loss`.

    Args:
        trainer: of transformers.
        steps: number of the trainer's batches in a batch.
    """

    def __init__(self, trainer: Any, steps: int) -> None:
        names = (LABELS, *(name for name in trainer.label_names or () if name != LABELS))
        super().__init__(self._computed, partial(integer_labels, names=names), steps=steps)
        self._trainer = trainer
        self._takes_items = False  # the model's own loss does, as seen in the last call

    def __call__(self, model: nn.Module, batch: Any, *args: Any) -> tuple[Tensor, Tensor]:
        loss, count = super().__call__(model, batch, *args)
        return loss, self._told(batch, count)

    def with_outputs(self, model: nn.Module, batch: Any) -> LossAndOutputs:
        """Compute the loss, keeping the model's outputs."""
        outputs: list[Any] = []
        loss, count = self(model, batch, partial(self._computed, outputs=outputs))
        return LossAndOutputs(loss, count, outputs[0])

    def _computed(
        self,
        model: nn.Module,
        batch: Any,
        labels: Mapping[str, Tensor],
        count: Tensor | None,
        *,
        outputs: list[Any] | None = None,
    ) -> Tensor:
        items = self._count_items(batch) if self._needs_items(batch) else None
        if items is not None:
            items = items.clamp(min=1)
        # Some losses divide terms by the accumulation steps: here there is a single step.
        self._trainer.current_gradient_accumulation_steps = 1
        with collect_logs(count_samples(batch)), self._watch_loss_function(model, batch) as more:
            made = self._trainer.compute_loss(
                model,
                to_model_inputs({**batch, **labels, **more}),
                return_outputs=outputs is not None,
                num_items_in_batch=items,
            )
        if outputs is None:
            return made  # type: ignore[no-any-return]
        outputs.append(made[1])
        return made[0]  # type: ignore[no-any-return]

    def _needs_items(self, batch: Any) -> bool:
        """Return True if a user's loss function receives the number of labels, as in transformers.
        A model taking the number gives an equal mean without it."""
        trainer = self._trainer
        own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
        told = trainer.compute_loss_func or (own and trainer.model_accepts_loss_kwargs)
        return bool(told) and batch.get(LABELS) is not None

    @contextmanager
    def _watch_loss_function(self, model: nn.Module, batch: Any) -> Iterator[dict[str, None]]:
        """Note if a model taking the number of labels passes it to its loss function, inside the
        context; a model with its own loss takes its own mean. Yields extra arguments of forward:
        the number as None, passed on like a number."""
        base: Any = model
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        own = type(self._trainer).compute_loss is not transformers.Trainer.compute_loss
        function = getattr(base, "loss_function", None)
        takes = self._trainer.model_accepts_loss_kwargs and self._count_items(batch) is not None
        smoothed = self._trainer.label_smoother is not None and not self._trainer.compute_loss_func
        if takes and smoothed and not own:
            self._takes_items = True  # transformers divides the smoothed loss by the number
        if own or function is None or not takes or smoothed:
            yield {}
            return
        self._takes_items = False

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._takes_items |= ITEMS in kwargs
            return function(*args, **kwargs)

        base.loss_function = noted
        try:
            yield {ITEMS: None}
        finally:
            base.loss_function = function

    def _count_items(self, batch: Any) -> Tensor | None:
        """Return the number of labels as counted by transformers for the model's class: per sample
        possibly one more or fewer than in the loss. None without a count."""
        trainer, own = self._trainer, batch.get(LABELS)
        if not isinstance(own, Tensor):
            return None
        labels = batch.get(SHIFTED)
        if labels is None:
            labels = own[..., 1:] if trainer._loss_shifts_labels else own
        return (labels != IGNORED_LABEL).sum()

    def _told(self, batch: Any, count: Tensor) -> Tensor:
        """Return transformers' denominator."""
        items = self._count_items(batch) if self._takes_items else None
        if items is None or self.rule is None or self.rule.kind not in ("labels", "graph"):
            return count
        smoother = self._trainer.label_smoother
        if self.rule.kind == "labels":
            return items
        # The graph shows the denominator of a part of the smoothed loss, without its factor.
        return count if smoother is None else items / (1.0 - smoother.epsilon)


@contextmanager
def disable_gathering(accelerator: Any) -> Iterator[None]:
    """Replace gathering from all ranks by local values, inside the context: ranks compute different
    numbers of micro-batches, and none may wait for another. Some losses of transformers ask
    Accelerate's state for other processes, for example to count boxes."""
    before = {name: vars(accelerator).get(name) for name in GATHERING_METHODS}
    vars(accelerator).update(dict.fromkeys(GATHERING_METHODS, _return_unchanged))
    of_all = vars(PartialState)["_shared_state"]  # by `vars`: it is a descriptor
    PartialState._shared_state = {}
    try:
        yield
    finally:
        PartialState._shared_state = of_all
        for name, own in before.items():
            if own is None:
                delattr(accelerator, name)
            else:
                setattr(accelerator, name, own)


def _return_unchanged(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value
