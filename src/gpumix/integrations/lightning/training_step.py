"""Steps of a module on global batches: the engine calls the module micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from gpumix.engine.batch.batch_split import count_samples
from gpumix.engine.engine import Engine
from gpumix.engine.loss.reduction import (
    ObjectiveWithRule,
    ReducedLoss,
    SummedLoss,
    expect_gradient,
    integer_labels,
)
from gpumix.engine.rehearsal.additivity import padding_counts
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.integrations.accelerate.row_independence import check_row_independence
from gpumix.integrations.common.forward import (
    clone_inference_tensor,
    compute_by_place,
    copy_to_host,
)
from gpumix.integrations.lightning.batch_counts import UNLIKE_SAMPLES
from gpumix.integrations.lightning.collectives import is_output_rank
from gpumix.integrations.lightning.logged_value_rules import LoggedPart
from gpumix.integrations.lightning.logging import MicroBatchLog, StepLogs, ignore_log
from gpumix.schema.errors import InputError

TRAINING = "training_step"
METRIC_METHODS = ("forward", "update")  # methods of a metric, which torchmetrics wraps per instance
MOST_ATTEMPTS = 5  # to tell rules for a batch's logged values apart
HOW_TO_COUNT = (
    "GpumixStrategy(count=lambda batch: N), N the number of items of a batch that its loss is a "
    "mean over"
)
EMPTY_ROW_SHAPE = (0,)  # the row shape for a `predict_step` returning nothing


class ModuleSteps:
    """Training, validation, test and prediction of a module.

    Args:
        count: returns the number of items in the mean loss of a batch; by default labels, or
            samples.
    """

    def __init__(self, count: Callable[[Any], Tensor | int] | None) -> None:
        self._count = count
        self._others: tuple[Any, ...] = ()
        self._logs: dict[str, StepLogs] = {}
        self._now: tuple[StepLogs, int] | None = None  # of the last step, with its samples
        self._is_first_prediction = True
        self._engine: Engine | None = None
        self.loss: ObjectiveWithRule = (
            ReducedLoss(self._computed, integer_labels, how_to_count=HOW_TO_COUNT)
            if count is None
            else SummedLoss(self._summed, how_to_count=HOW_TO_COUNT)
        )

    def begin(self, trainer: Any, module: LightningModule) -> None:
        """Begin without an engine: copies of the module are measured first."""
        self._trainer, self._module = trainer, module
        takes_place = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._others = (0,) if takes_place else ()

    def told(self, optimizers: Sequence[str]) -> str:
        """Return text identifying this module's steps, for reuse of measurements."""
        # transformers' model inside the module; without any, the module.
        inside = (one for one in self._module.modules() if hasattr(one, "loss_function"))
        config = getattr(next(inside, self._module), "config", None)
        return f"Lightning {list(optimizers)} {config}"

    def serve(self, engine: Engine) -> None:
        self._engine = engine
        self._logs, self._now = {}, None

    def has_padding_dependence(self, narrow: Any, wide: Any) -> bool:
        """Return True if a sample's loss depends on its padding; see `padding_counts`."""
        assert self._engine is not None
        self._noted(TRAINING, 1)
        with self._silence_logging():
            return padding_counts(self._engine, self.loss, narrow, wide)

    # -- steps -------------------------------------------------------------------------------------

    def train(self, values: Any, others: tuple[Any, ...], samples: int) -> Tensor:
        """Compute the loss of a batch of `samples`, given this rank's part. Collective."""
        assert self._engine is not None
        self._others = others
        logs = self._noted(TRAINING, samples)
        if not self._engine.is_settled(in_step=True):
            with self._silence_logging():
                self._engine.settle(values, samples, in_step=True)
        with logs.listening():
            loss = self._engine.step(values, samples=samples)
        self._settle(logs, self._counted, values, samples, in_step=True)
        return loss

    def look_back(self) -> None:
        """Check, after training, that losses of the last steps added up."""
        assert self._engine is not None
        with self._silence_logging():
            self._engine.look_back()

    def _settle(
        self,
        logs: StepLogs,
        step: Callable[[Any, Any, MicroBatchLog], Any],
        values: Any,
        samples: int,
        *,
        in_step: bool = False,
    ) -> None:
        """Combine the values logged for a batch; where it is not known how, compare values of some
        samples with values of their parts. Collective."""
        assert self._engine is not None

        def part(model: nn.Module, batch: Any) -> LoggedPart:
            told: list[LoggedPart] = []
            with logs.part(self._weight(batch), batch, told) as noted, torch.enable_grad():
                step(model, batch, noted)
            return told[0]

        logs.exchange()
        for attempt in range(MOST_ATTEMPTS):
            if not logs.unsettled:
                break
            with torch.inference_mode(False):
                values = tree_map(clone_inference_tensor, values)
            with (
                self._silence_logging(),
                logs.listening(compares=True),
                torch.inference_mode(False),
                torch.no_grad(),
            ):
                parts = self._engine.in_parts(
                    part,
                    values,
                    samples,
                    in_step=in_step,
                    chosen=UNLIKE_SAMPLES,
                    turn=None if logs.is_new and not attempt else attempt,
                )
            logs.compare(parts)
            logs.exchange()
        logs.warn_unsettled()

    def evaluate(self, hook: str, values: Any, others: tuple[Any, ...], samples: int) -> Any:
        """Run the module's step on this rank's samples; return predictions by places in the global
        batch, nothing for other steps. Collective."""
        assert self._engine is not None
        logs = self._noted(hook, samples)
        step = getattr(self._module, hook)
        reads = logs.reads_graphs and hook != "predict_step"
        if reads:
            with torch.inference_mode(False):
                values = tree_map(clone_inference_tensor, values)

        def made(model: nn.Module, batch: Any) -> Any:
            with logs.micro_batch(self._weight(batch), batch), torch.set_grad_enabled(reads):
                told = step(batch, *others)
            if hook != "predict_step":
                return torch.zeros(count_samples(batch))
            if told is None:
                return torch.zeros(count_samples(batch), *EMPTY_ROW_SHAPE)
            _refuse_without_rows(told, count_samples(batch))
            with count_as_host_memory():
                return tree_map(copy_to_host, told)

        if hook == "predict_step":
            if self._is_first_prediction:
                with self._silence_logging():
                    check_row_independence(self._engine, made, values, samples)
            self._is_first_prediction = False
        with logs.listening(), torch.inference_mode(False), torch.no_grad():
            found = compute_by_place(self._engine, made, values, samples)
        self._settle(logs, lambda model, batch, noted: step(batch, *others), values, samples)
        return found

    def publish(self) -> None:
        """Pass values logged in the last step to Lightning. Collective."""
        if self._now is not None:
            logs, samples = self._now
            logs.publish(samples)

    def _summed(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return (summed loss, count) of a micro-batch, by the user's count."""
        assert self._count is not None
        count = torch.as_tensor(self._count(batch))
        with expect_gradient(count) as expected:
            loss = self._computed(model, batch, {}, count)
            expected.settle(loss)
        return loss.float() * count, count

    def _computed(
        self, model: Any, batch: Any, labels: Mapping[str, Tensor], count: Tensor | None
    ) -> Tensor:
        """Return the loss of a micro-batch."""
        if labels:
            batch = {**batch, **labels}
        if model is not self._module:
            self._attach(model)
            return self._returned(model, batch)
        if self._now is None:  # probing the order of its blocks
            with self._silence_logging():
                return self._returned(model, batch)
        weight = _samples(batch) if count is None else count
        with self._now[0].micro_batch(weight, batch) as noted:
            return self._counted(model, batch, noted)

    def _counted(self, model: Any, batch: Any, noted: MicroBatchLog) -> Tensor:
        """Return the loss of a micro-batch; its logged values get the loss's denominator as
        weight."""
        if not (isinstance(self.loss, ReducedLoss) and self.loss.reads_graph):
            return self._returned(model, batch)
        with torch.enable_grad():
            loss = self._returned(model, batch)
        noted.weight = self.loss.read_denominator(loss, batch).detach()
        return loss

    def _returned(self, model: Any, batch: Any) -> Tensor:
        made = model.training_step(batch, *self._others)
        loss = made.get("loss") if isinstance(made, Mapping) else made
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InputError(
                f"{type(model).__name__}.training_step returned no loss",
                code="training-step-without-loss",
                why="all ranks take every step together",
                fix="return a mean loss, or a dictionary with one as 'loss'",
            )
        return loss.reshape(())

    # -- inside ------------------------------------------------------------------------------------

    def _noted(self, hook: str, samples: int) -> StepLogs:
        assert self._engine is not None
        if hook not in self._logs:
            counts = is_output_rank(self._engine.plan, self._engine.comm.rank)
            self._logs[hook] = StepLogs(
                self._module,
                self._engine.comm,
                tells=counts,
                by_step=hook == TRAINING,
                is_cut=not self._engine.plan.is_uncut,
            )
        self._now = (self._logs[hook], samples)
        return self._logs[hook]

    def _weight(self, batch: Any) -> Tensor:
        """Return the weight of values logged for a micro-batch."""
        if self._count is not None:
            try:
                return torch.as_tensor(self._count(batch))
            except LookupError:  # batches of an evaluation may lack what is counted in training
                return _samples(batch)
        assert isinstance(self.loss, ReducedLoss)
        return self.loss.count(batch)

    @contextmanager
    def _silence_logging(self) -> Iterator[None]:
        """Silence logging and metrics of the module inside the context."""
        with ExitStack() as stack:
            for owner, silent in _list_silent_attributes(self._module):
                stack.enter_context(replace_attributes(owner, **silent))
            yield

    def _attach(self, model: Any) -> None:
        """Attach the trainer to a measured copy, and silence the copy."""
        if model._trainer is not None:
            return
        model.trainer = self._trainer
        for owner, silent in _list_silent_attributes(model):
            vars(owner).update(silent)


def _samples(batch: Any) -> Tensor:
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    device = next((tensor.device for tensor in tensors), None)
    return torch.full((), count_samples(batch), device=device)


def _list_silent_attributes(module: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the objects that log, metrics and the module itself, each with silent attributes."""
    silent = dict.fromkeys(METRIC_METHODS, lambda *args, **kwargs: torch.zeros(()))
    metrics = [one for one in module.modules() if isinstance(one, Metric)]
    return [*((metric, silent) for metric in metrics), (module, {"log": ignore_log})]


def _refuse_without_rows(told: Any, samples: int) -> None:
    """Raise InputError if a prediction of `samples` has not a row per sample."""
    for leaf in tree_leaves(told):
        returned = f"an object of class {type(leaf).__name__}"
        if isinstance(leaf, Tensor):
            if leaf.dim() and len(leaf) == samples:
                continue
            returned = f"a tensor of shape {tuple(leaf.shape)}"
        raise InputError(
            f"predict_step returned {returned} of {samples} samples",
            code="predictions-not-per-sample",
            why="predictions of micro-batches and ranks are put together row by row",
            fix="return tensors with one row for each sample; make texts of them afterwards",
        )
