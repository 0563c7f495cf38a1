"""Padded widths of a trainer's batches on each rank."""

from __future__ import annotations

import weakref
from typing import Any

from gpumix.integrations.dataloader.example_batch import are_padded
from gpumix.integrations.dataloader.sharded_loader import Width


class Widths:
    """Widths of a trainer's batches; `trained` is for training, and for evaluation of losses."""

    def __init__(self, trainer: Any) -> None:
        self.trained = Width()
        self._trainer: Any = weakref.proxy(trainer)
        # The last dataset evaluated or predicted, and the width of its batches.
        self._known: dict[str, tuple[Any, Width]] = {}

    def evaluated(self, description: str, dataset: Any, collate: Any, given: Any = None) -> Width:
        """Return an evaluation's width. Predictions cover padding: with samples of different
        lengths each rank pads as in the global batch. Collective.

        Args:
            description: "Evaluation" or "Prediction".
            given: the program's dataset, if `dataset` is made of it.
        """
        trainer, given = self._trainer, dataset if given is None else given
        needs_losses_alone = description == "Evaluation" and trainer.compute_metrics is None
        if needs_losses_alone or trainer.args.prediction_loss_only:
            return self.trained
        known, width = self._known.get(description, (None, None))
        if width is None or known is not given:
            width = Width(common=are_padded(dataset, collate))
            self._known[description] = given, width
        return width
