"""Padded widths of a trainer's batches on each rank."""

from __future__ import annotations

import weakref
from typing import Any

from gpumix.integrations.dataloader.example_batch import needs_padding
from gpumix.integrations.dataloader.sharded_loader import PaddingScope


class PaddingScopes:
    """Widths of a trainer's batches; `trained` is for training, and for evaluation of losses."""

    def __init__(self, trainer: Any) -> None:
        self.trained = PaddingScope()
        self._trainer: Any = weakref.proxy(trainer)
        # The last dataset evaluated or predicted, and the width of its batches.
        self._known: dict[str, tuple[Any, PaddingScope]] = {}

    def evaluated(
        self, description: str, dataset: Any, collate: Any, given: Any = None
    ) -> PaddingScope:
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
            width = PaddingScope(is_global=needs_padding(dataset, collate))
            self._known[description] = given, width
        return width
