"""Evaluations by transformers' own loop, on the model as a user has it between steps.

Such are: a model that trains nothing, in one process; predictions of samples without labels before
any training; text that is generated; a program's own `prediction_step`. There is nothing to plan by
for the first two; the others call the model in ways that only they know, and their losses are those
of another evaluation, by the plan. Each rank evaluates an equal part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from gpumix.engine.outside import outside_of
from gpumix.engine.outside import whole as whole_model
from gpumix.engine.units import trains
from gpumix.integrations.hosted import world
from gpumix.integrations.own_batches import OwnLoader
from gpumix.integrations.specimens import specimen_of
from gpumix.integrations.trainer.evaluation import has_loss


class StockEvaluation:
    """What a trainer evaluates so.

    Args:
        always: whatever the data are like: the program has its own `prediction_step`, or generates.
    """

    def __init__(self, trainer: Any, *, always: bool) -> None:
        self._trainer: Any = weakref.proxy(trainer)
        self._always = always
        # Of each of these loaders, the one that gives ranks of a plan the same batches.
        self._loaders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def wanted(self, dataset: Any, collate: Any) -> bool:
        """Whether batches of a dataset are evaluated so. Collective."""
        trainer = self._trainer
        if self._always:
            return True
        if trainer.has_engine:
            return False
        if not trains(trainer.model) and world() == 1:
            return True
        return not has_loss(trainer, specimen_of(dataset, collate).batch(1))

    def loader(self, make: Callable[[], Any], planned: Callable[[], OwnLoader]) -> Any:
        """The loader that transformers makes, which gives each rank an equal part. Collective.

        Args:
            planned: makes the one that gives each rank what the plan says.
        """
        accelerator = self._trainer.accelerator
        ours = vars(accelerator).pop("prepare_data_loader")
        try:
            made = make()
        finally:
            accelerator.prepare_data_loader = ours
        self._loaders[made] = planned() if accelerator.num_processes > 1 else None
        return made

    def prepared(self, loader: Any, planned: Callable[[], OwnLoader]) -> Any:
        """The same of a loader that the program makes. Collective."""
        prepare = self._trainer.accelerator.prepare_data_loader
        return self.loader(partial(prepare, loader), planned)

    def planned(self, loader: Any) -> OwnLoader | None:
        """The loader of the same batches by the plan, which there is then, of several ranks that
        have a loss of them; else None. Collective."""
        planned: OwnLoader | None = self._loaders[loader]
        if planned is None:
            return None
        dataset, trainer = (planned.whole, planned.collated), self._trainer
        if not trainer.has_engine and not has_loss(trainer, specimen_of(*dataset).batch(1)):
            return None
        trainer._hosted(*dataset)
        return planned

    def is_of(self, loader: Any) -> bool:
        return loader in self._loaders

    @contextmanager
    def under_way(self, move: Callable[[Any, Any], None]) -> Iterator[None]:
        """Inside, the model is one that transformers' loop can call. Collective.

        Args:
            move: takes an ordinary model to a device, as transformers does.
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
        # No sample counts twice, whatever is predicted of it.
        trainer.gather_function = accelerator.gather_for_metrics
        if not trainer.has_engine:
            move(trainer.model, trainer.args.device)
            try:
                yield
            finally:  # which may have wrapped its forward
                accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
                accelerator._models.clear()
            return
        with ExitStack() as stack:
            outside = outside_of(trainer.model)
            if outside is not None and not outside.can_be_called:
                stack.enter_context(whole_model(trainer.model))
            # The model is where it is, and computes in its own dtype.
            accelerator.prepare_model = lambda model, **kwargs: model
            stack.callback(lambda: vars(accelerator).pop("prepare_model"))
            yield
