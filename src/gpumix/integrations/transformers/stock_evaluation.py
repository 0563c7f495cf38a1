"""Evaluation by transformers' own loop, on the model in its state between steps.

Cases: a model without anything to train, in a single process; predictions without labels before any
training; generated text; a program's own `prediction_step`. The first two leave nothing to plan by.
The rest call the model in unknown ways; their losses come from a second evaluation, by the plan.
Each rank evaluates an equal part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from gpumix.engine.access_between_steps import get_access_between_steps
from gpumix.engine.access_between_steps import summon_full_params as whole_model
from gpumix.engine.sharding.unit_discovery import has_trainable_parameters
from gpumix.engine.weights.whole_values import read_all_values
from gpumix.integrations.common.plan_and_shard import get_world_size
from gpumix.integrations.dataloader.example_batch import find_example
from gpumix.integrations.dataloader.sharded_loader import RankLoader
from gpumix.integrations.transformers.evaluation import has_loss


class StockEvaluation:
    """Evaluations of a trainer by transformers' loop.

    Args:
        always: for any data: the program has its own `prediction_step`, or generates.
    """

    def __init__(self, trainer: Any, *, always: bool) -> None:
        self._trainer: Any = weakref.proxy(trainer)
        self._always = always
        # For each of these loaders a loader of the same batches by the plan.
        self._loaders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def wanted(self, dataset: Any, collate: Any) -> bool:
        """Return True if batches of a dataset are evaluated by transformers' loop. Collective."""
        trainer = self._trainer
        if self._always:
            return True
        if trainer.has_engine:
            return False
        if not has_trainable_parameters(trainer.model) and get_world_size() == 1:
            return True
        return not has_loss(trainer, find_example(dataset, collate).batch(1))

    def loader(self, make: Callable[[], Any], planned: Callable[[], RankLoader]) -> Any:
        """Return transformers' loader, with an equal part for each rank. Collective.

        Args:
            planned: makes the loader of a rank's part by the plan.
        """
        accelerator = self._trainer.accelerator
        ours = vars(accelerator).pop("prepare_data_loader")
        try:
            made = make()
        finally:
            accelerator.prepare_data_loader = ours
        self._loaders[made] = planned() if accelerator.num_processes > 1 else None
        return made

    def prepare_loader(self, loader: Any, planned: Callable[[], RankLoader]) -> Any:
        """Return a program's own loader, prepared as by `loader`. Collective."""
        prepare = self._trainer.accelerator.prepare_data_loader
        return self.loader(partial(prepare, loader), planned)

    def get_planned_loader(self, loader: Any) -> RankLoader | None:
        """Return the loader of equal batches by the plan, with the plan made; None for a single
        rank or batches without a loss. Collective."""
        planned: RankLoader | None = self._loaders[loader]
        if planned is None:
            return None
        dataset, trainer = (planned.whole, planned.collated), self._trainer
        if not trainer.has_engine and not has_loss(trainer, find_example(*dataset).batch(1)):
            return None
        trainer._hosted(*dataset)
        return planned

    def has_loader(self, loader: Any) -> bool:
        return loader in self._loaders

    @contextmanager
    def under_way(self, move: Callable[[Any, Any], None]) -> Iterator[None]:
        """Make the model callable by transformers' loop inside the context. Collective.

        Args:
            move: takes an ordinary model to a device, as transformers does.
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
        # No sample counts twice in any prediction.
        trainer.gather_function = accelerator.gather_for_metrics
        if not trainer.has_engine:
            read_all_values(trainer.model)
            move(trainer.model, trainer.args.device)
            try:
                yield
            finally:  # the loop may have wrapped forward
                accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
                accelerator._models.clear()
            return
        with ExitStack() as stack:
            outside = get_access_between_steps(trainer.model)
            if outside is not None and not outside.can_be_called:
                stack.enter_context(whole_model(trainer.model))
            # The model stays in place, and computes in its own dtype.
            accelerator.prepare_model = lambda model, **kwargs: model
            stack.callback(lambda: vars(accelerator).pop("prepare_model"))
            yield
