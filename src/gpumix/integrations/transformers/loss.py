"""Loss of a trainer's micro-batch, as a sum and a count.

`compute_loss` makes the loss, including any override by a subclass or user.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gpumix.engine.batch.batch_split import IGNORED_LABEL, LABELS, count_samples
from gpumix.engine.batch.ragged_batch import to_model_inputs
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.loss.reduction import ReducedLoss, integer_labels
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.integrations.common.gather import gather_texts
from gpumix.integrations.transformers.step_logs import collect_logs

_LOG = logging.getLogger(__name__)
HOW_TO_COUNT = (
    "let compute_loss return a sum divided by the number of items that it counts, such as "
    "(losses * mask).sum() / mask.sum(); or give items that do not count the label -100"
)
PROCESSES = "num_processes"
ITEMS, SHIFTED = "num_items_in_batch", "shift_labels"
GATHERING_METHODS = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


class ItemCount(Tensor):
    """Number of labels in a batch, noting its use by a loss. Operations return plain tensors.

    Attributes:
        uses: names of operations with the value; without those of a block only given the number.
    """

    uses: set[str]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def take(count: ItemCount) -> Tensor:
            if function.__name__ not in ("__get__", "detach", "is_inference"):
                count.uses.add(function.__name__)
            return count.as_subclass(Tensor)

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(ItemCount, take, (args, kwargs or {}))
            return function(*args, **kwargs)


class TrainerLoss(ReducedLoss):
    """Loss of a micro-batch by `compute_loss`. A batch has the samples of a step.

    Stock adds the losses of a step's batches, each divided by their number unless
    `loss_is_scaled_for_ga`. A loss dividing by the number of labels of the step is the step's mean;
    any other mean comes once for each batch.

    Args:
        trainer: of transformers.
        steps: number of stock's batches in a full step.
        samples: number of samples of a stock batch.
    """

    def __init__(self, trainer: Any, *, steps: int, samples: int) -> None:
        names = (LABELS, *(name for name in trainer.label_names or () if name != LABELS))
        labels_of = partial(integer_labels, names=names)
        super().__init__(self._computed, labels_of, how_to_count=HOW_TO_COUNT)
        self._trainer = trainer
        self._steps, self._samples = steps, samples
        self._observer = LossFunctionObserver()
        # Whether the loss divides by the number of labels of the step: a guess, until observed.
        self._takes_items = _names_items(trainer.compute_loss_func or type(trainer).compute_loss)
        self._observed: bool | None = None  # in the last call
        self._has_told_difference = False

    def __call__(
        self, model: nn.Module, batch: Any, *args: Any, times: float | None = None
    ) -> tuple[Tensor, Tensor]:
        times = self._count_means(batch) if times is None else times
        loss, count = super().__call__(model, batch, *args, times=times)
        return loss, self._told(batch, count)

    def evaluate(
        self, model: nn.Module, batch: Any, outputs: list[Any] | None
    ) -> tuple[Tensor, Tensor]:
        """Return (summed loss, count) of a micro-batch in an evaluation, which has no steps; add
        the model's outputs to `outputs`."""
        computed = () if outputs is None else (partial(self._computed, outputs=outputs),)
        return self(model, batch, *computed, times=1.0)

    def settle(self, batch: Any, comm: Communicator) -> None:
        """Take the observations of all ranks' calls as a property of the loss. Collective.

        Args:
            batch: samples of this rank.
        """
        own = "" if self._observed is None else str(int(self._observed))
        told = "".join(gather_texts(own, comm, "gathering of uses of the number of labels"))
        if told:
            self._takes_items = "1" in told
        if self._steps > 1 and not self._takes_items and comm.rank == 0:
            self._tell_difference(batch)

    def _tell_difference(self, batch: Any) -> None:
        """Log it if samples weigh differently in stock's mean of the means of batches."""
        rule = self.rule
        if rule is None or rule.kind not in ("labels", "graph") or self._has_told_difference:
            return
        labels = self.labels_of(batch).get(rule.labels)
        if rule.kind == "labels" and labels is not None and labels.dim() == 1:
            return
        self._has_told_difference = True
        _LOG.warning(
            "The loss is %s: of all %d batches of a step at once, each with the same weight. "
            "The stock Trainer adds the means of the batches, which differs where they have unlike "
            "numbers of these. A loss divided by num_items_in_batch is equal in both",
            rule.name,
            self._steps,
        )

    def _count_means(self, batch: Any) -> float:
        """Return the factor of the batch's mean or sum that makes it stock's loss of a step."""
        trainer, steps = self._trainer, self._count_steps()
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = self._is_counted(batch) or trainer.compute_loss_func is not None
        comes_once = self._takes_items or (self.rule is not None and self.rule.kind == "sum")
        return (1.0 if comes_once else steps) / (1.0 if is_scaled else steps)

    def _computed(
        self,
        model: nn.Module,
        batch: Any,
        labels: Mapping[str, Tensor],
        count: Tensor | None,
        *,
        outputs: list[Any] | None = None,
    ) -> Tensor:
        uses: set[str] = set()
        items = self._make_items(batch, uses) if self._needs_items(batch) else None
        with collect_logs(count_samples(batch)), self._watch_loss_function(model, batch) as more:
            made = self._trainer.compute_loss(
                model,
                to_model_inputs({**batch, **labels, **more}),
                return_outputs=outputs is not None,
                num_items_in_batch=items,
            )
        if self._is_users:
            self._observed = bool(uses)
        if outputs is None:
            return made  # type: ignore[no-any-return]
        outputs.append(made[1])
        return made[0]  # type: ignore[no-any-return]

    def _count_steps(self) -> int:
        """Return the number of stock's batches in the current step; less at an epoch's end."""
        return min(self._steps, math.ceil(self.whole / self._samples))

    @contextmanager
    def in_one_process(self) -> Iterator[None]:
        """Let losses see a single process, inside the context, and the number of accumulation steps
        by which they may divide terms: 1 if the loss divides by the number of labels of all steps,
        else the user's."""
        trainer = self._trainer
        steps = 1 if self._takes_items else self._count_steps()
        with (
            replace_attributes(trainer, current_gradient_accumulation_steps=steps),
            disable_gathering(trainer.accelerator),
            nullcontext() if self._takes_items else trainer._given_counts(),
        ):
            yield

    def _needs_items(self, batch: Any) -> bool:
        """Return True if a user's loss function receives the number of labels, as in transformers.
        A model taking the number gives an equal mean without it."""
        trainer = self._trainer
        told = trainer.compute_loss_func is not None or trainer.model_accepts_loss_kwargs
        return self._is_users and told and batch.get(LABELS) is not None

    @property
    def _is_users(self) -> bool:
        """True if a function of the user computes the loss."""
        trainer = self._trainer
        own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
        return own or trainer.compute_loss_func is not None

    @contextmanager
    def _watch_loss_function(self, model: nn.Module, batch: Any) -> Iterator[dict[str, Any]]:
        """Note if a model taking the number of labels uses it, or passes it to its loss function,
        inside the context; another model's loss is its own mean. Yields extra arguments of forward:
        the number, or None to be passed on like a number."""
        if self._is_users:
            yield {}
            return
        takes = self._is_counted(batch)
        base: Any = model
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        smoothed = self._trainer.label_smoother is not None
        if takes and not smoothed and _names_items(type(base).forward):
            uses: set[str] = set()
            yield {ITEMS: self._make_items(batch, uses)}
            self._observed = bool(uses)
            return
        if smoothed or not takes or getattr(base, "loss_function", None) is None:
            yield {}
            self._observed = takes and smoothed  # by transformers, which divides by the number
            return
        with self._observer.collect(base) as arguments:
            yield {ITEMS: None}
        self._observed = ITEMS in arguments

    def _is_counted(self, batch: Any) -> bool:
        """Return True if transformers counts the labels of a batch for the model."""
        labels = batch.get(LABELS)
        return self._trainer.model_accepts_loss_kwargs and isinstance(labels, Tensor)

    def _make_items(self, batch: Any, uses: set[str]) -> ItemCount | None:
        """Return the number of labels, which adds to `uses`; None without a count."""
        items = self._count_items(batch)
        if items is None:
            return None
        noted = items.clamp(min=1).as_subclass(ItemCount)
        noted.uses = uses
        return noted

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
        told = self._takes_items and not self._is_users
        items = self._count_items(batch) if told else None
        if items is None or self.rule is None or self.rule.kind not in ("labels", "graph"):
            return count
        smoother = self._trainer.label_smoother
        if self.rule.kind == "labels":
            return items
        # The graph shows the denominator of a part of the smoothed loss, without its factor.
        return count if smoother is None else items / (1.0 - smoother.epsilon)


class LossFunctionObserver:
    """Collector of the names of keyword arguments given to a model's loss function. Micro-batches
    are computed interleaved, so contexts overlap: a single function is installed for all."""

    def __init__(self) -> None:
        self._arguments: ContextVar[set[str]] = ContextVar("arguments")
        self._number = 0  # of open contexts
        self._undo: Callable[[], None] = lambda: None

    @contextmanager
    def collect(self, model: Any) -> Iterator[set[str]]:
        """Yield the names in calls of the model's loss function inside the context."""
        if self._number == 0:
            self._install(model)
        self._number += 1
        token = self._arguments.set(set())
        try:
            yield self._arguments.get()
        finally:
            self._arguments.reset(token)
            self._number -= 1
            if self._number == 0:
                self._undo()

    def _install(self, model: Any) -> None:
        function, before = model.loss_function, set(vars(model))

        def observe(*args: Any, **kwargs: Any) -> Any:
            self._arguments.get(set()).update(kwargs)
            return function(*args, **kwargs)

        model.loss_function = observe
        added = set(vars(model)) - before

        def undo() -> None:
            for name in added:  # a property of the class shows again
                delattr(model, name)
            if not added:
                model.loss_function = function

        self._undo = undo


@functools.cache
def _names_items(function: Any) -> bool:
    """Return True if a function's body names the number of labels of a step outside of its
    signature, or is unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or any(one.argval == ITEMS for one in dis.get_instructions(code))


@contextmanager
def disable_gathering(accelerator: Any) -> Iterator[None]:
    """Replace gathering from all ranks by local values, inside the context: ranks compute different
    numbers of micro-batches, and none may wait for another. Some losses of transformers ask
    Accelerate's state for other processes, for example to count boxes."""
    local = dict.fromkeys(GATHERING_METHODS, lambda value, *args, **kwargs: value)
    of_all = vars(PartialState)["_shared_state"]  # by `vars`: it is a descriptor
    states = [of_all, vars(AcceleratorState)["_shared_state"]]  # of all objects of the classes
    numbers = [state.get(PROCESSES) for state in states]
    for state, number in zip(states, numbers):
        if number is not None:
            state[PROCESSES] = 1  # losses that ranks average are multiplied by it
    try:
        with (
            replace_attributes(accelerator, **local),
            replace_attributes(PartialState, _shared_state={}),
        ):
            yield
    finally:
        for state, number in zip(states, numbers):
            if number is not None:
                state[PROCESSES] = number
