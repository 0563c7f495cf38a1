"""Evaluation and prediction of a trainer: each rank computes its part, all get the results.

The loss is the mean over samples of the mean loss of their batches, as in transformers, on any
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import Seq2SeqTrainer
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    denumpify_detensorize,
    has_length,
)

from gpumix.engine.batch.batch_split import LABELS, count_samples
from gpumix.engine.batch.ragged_batch import SampleEntries, to_model_inputs
from gpumix.engine.engine import Engine
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.integrations.accelerate.row_independence import check_row_independence
from gpumix.integrations.common.forward import compute_by_place, copy_to_host
from gpumix.integrations.common.gather import PADDING, gather_rows
from gpumix.integrations.transformers.loss import TrainerLoss
from gpumix.schema.errors import InputError

SUM, COUNT, LOGITS, INPUTS, LOSSES = "sum", "count", "logits", "inputs", "losses"


class EvaluationResults:
    """Results of an evaluation so far, on the host.

    Args:
        batch: samples of a batch, which may come in several parts.
        fills: losses of the last batch count as losses of a full batch.
        concatenates: concatenate the arrays of all batches.
    """

    def __init__(self, batch: int, *, fills: bool, concatenates: bool) -> None:
        self.samples = 0
        self._batch = batch
        self._fills = fills
        self._begun = (0.0, 0.0, 0)  # loss, count, samples of an incomplete batch
        self._kept = {
            name: EvalLoopContainer(concatenates, padding_index=PADDING)
            for name in (LOGITS, LABELS, INPUTS, LOSSES)
        }

    def add(self, rows: Mapping[str, Any], samples: int, *, keep: bool, last: bool) -> None:
        self.samples += samples
        if SUM in rows:
            loss, count, begun = self._begun
            self._begun = (loss + rows[SUM].sum(), count + rows[COUNT].sum(), begun + samples)
            if last or begun + samples == self._batch:
                self._end_batch()
        for name in (LOGITS, LABELS, INPUTS) if keep else ():
            if name in rows:
                self._kept[name].add(rows[name])

    def _end_batch(self) -> None:
        (loss, count, samples), self._begun = self._begun, (0.0, 0.0, 0)
        self._kept[LOSSES].add(_repeat_loss(loss, count, self._batch if self._fills else samples))

    def arrays(self, name: str) -> Any:
        return self._kept[name].get_arrays()

    def loss(self, *, finite_only: bool) -> float | None:
        """Return the mean loss, or None without losses.

        Args:
            finite_only: leave out batches with losses that are not finite, unless none is finite.
        """
        found = self.arrays(LOSSES)
        if found is None:
            return None
        losses = np.concatenate(found) if isinstance(found, list) else found
        finite = np.isfinite(losses)
        if finite_only and finite.any():
            losses = losses[finite]
        return float(losses.mean())


def evaluate(
    trainer: Any,
    engine: Engine,
    loader: Any,
    *,
    description: str,
    loss_only: bool,
    ignore_keys: Sequence[str] | None,
    prefix: str,
) -> EvalLoopOutput:
    """Run `Trainer.evaluation_loop` by the plan. Collective."""
    args, metrics = trainer.args, None
    keep = not args.batch_eval_metrics or description == "Prediction"
    seen = EvaluationResults(
        loader.total_batch_size,
        fills=isinstance(trainer, Seq2SeqTrainer),  # drops nothing gathered
        concatenates=args.eval_do_concat_batches,
    )
    trainer.callback_handler.eval_dataloader = loader
    for rows, samples, last in _evaluate_batches(trainer, engine, loader, loss_only, ignore_keys):
        seen.add(rows, samples, keep=keep, last=last)
        trainer.control = trainer.callback_handler.on_prediction_step(
            args, trainer.state, trainer.control
        )
        if args.batch_eval_metrics and trainer.compute_metrics and {LOGITS, LABELS} <= rows.keys():
            losses = (
                _repeat_loss(rows[SUM].sum(), rows[COUNT].sum(), samples) if SUM in rows else None
            )
            told = _make_eval_prediction(args, rows[LOGITS], rows[LABELS], rows.get(INPUTS), losses)
            metrics = trainer.compute_metrics(told, compute_result=last)
    logits, labels = seen.arrays(LOGITS), seen.arrays(LABELS)
    if metrics is None:
        metrics = {}
        if trainer.compute_metrics and logits is not None and labels is not None:
            inputs, losses = seen.arrays(INPUTS), seen.arrays(LOSSES)
            metrics = trainer.compute_metrics(
                _make_eval_prediction(args, logits, labels, inputs, losses)
            )
    metrics = denumpify_detensorize(metrics)
    loss = seen.loss(finite_only=args.logging_nan_inf_filter)
    if loss is not None:
        metrics[f"{prefix}_loss"] = loss
    named = {k if k.startswith(f"{prefix}_") else f"{prefix}_{k}": v for k, v in metrics.items()}
    number = len(loader.whole) if has_length(loader.whole) else seen.samples
    return EvalLoopOutput(predictions=logits, label_ids=labels, metrics=named, num_samples=number)


def _evaluate_batches(
    trainer: Any,
    engine: Engine,
    loader: Any,
    loss_only: bool,
    ignore_keys: Sequence[str] | None,
) -> Iterator[tuple[dict[str, Any], int, bool]]:
    """Yield the results of each batch, its samples, and True for the last batch."""
    ignored = _get_ignored_keys(trainer.model, ignore_keys)

    def made(model: nn.Module, batch: Any) -> dict[str, Any]:
        return _compute_results(trainer, model, batch, loss_only=loss_only, ignored=ignored)

    def predicted(model: nn.Module, batch: Any) -> Any:
        return made(model, batch)[LOGITS]

    batches = iter(loader)
    following = next(batches, None)
    is_first = True
    while following is not None:
        batch, following = following, next(batches, None)
        if has_loss(trainer, batch):
            trainer._settle(batch)
        if is_first and not loss_only:
            with trainer._measured():
                check_row_independence(engine, predicted, dict(batch), batch.samples)
        is_first = False
        parts = compute_by_place(engine, made, dict(batch), batch.samples)
        with count_as_host_memory():
            rows = gather_rows(parts, engine.comm, "gathering of predictions")
        yield rows or {}, batch.samples, following is None


def _compute_results(
    trainer: Any, model: nn.Module, batch: Any, *, loss_only: bool, ignored: Sequence[str]
) -> dict[str, Any]:
    """Compute the results of a micro-batch: tensors on the host, with a row per sample."""
    names = trainer.label_names
    rows = count_samples(batch)
    told: dict[str, Any] = {}
    if has_loss(trainer, batch):
        loss: TrainerLoss = trainer._loss
        kept: list[Any] = []
        total, count = loss.evaluate(model, batch, None if loss_only else kept)
        outputs = kept[0] if kept else None
        told[SUM] = _spread(total.detach().mean(), rows)
        told[COUNT] = _spread(count, rows)
    else:
        outputs = model(**to_model_inputs(batch))
    if loss_only:
        return told
    labels = tuple(batch[name] for name in names) if _is_labelled(trainer, batch) else None
    if any(isinstance(label, SampleEntries) for label in labels or ()):
        raise InputError(
            "labels that are a dictionary for each sample are not gathered",
            code="labels-not-gatherable",
            why="they have another size for each sample",
            fix="evaluate losses alone: TrainingArguments(prediction_loss_only=True)",
        )
    if labels is not None:
        told[LABELS] = _unwrap_single(labels)
    told[LOGITS] = _logits(trainer, outputs, told.get(LABELS), ignored)
    if INPUTS in trainer.args.include_for_metrics:
        told[INPUTS] = _inputs(trainer, batch)
    with count_as_host_memory():
        return {name: tree_map(copy_to_host, value) for name, value in told.items()}


def _is_labelled(trainer: Any, batch: Mapping[str, Any]) -> bool:
    names = trainer.label_names
    return bool(names) and all(batch.get(name) is not None for name in names)


def has_loss(trainer: Any, batch: Mapping[str, Any]) -> bool:
    """Return True if transformers computes a loss of the batch."""
    if trainer.label_names:
        return _is_labelled(trainer, batch)
    return bool(batch.get("return_loss", trainer.can_return_loss))


def _inputs(trainer: Any, batch: Any) -> Any:
    """Return inputs for metrics as transformers does: all of the batch for metrics by batch."""
    if trainer.args.batch_eval_metrics:
        return {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    return batch[getattr(trainer.model, "main_input_name", "input_ids")]


def _logits(trainer: Any, outputs: Any, labels: Any, ignored: Sequence[str]) -> Any:
    if isinstance(outputs, Mapping):
        values = tuple(v for k, v in outputs.items() if k not in (*ignored, "loss"))
    else:
        values = outputs[1:] if labels is not None else outputs
    logits = _unwrap_single(tuple(v for v in values if not (torch.is_tensor(v) and v.dim() == 0)))
    prepare: Callable[[Any, Any], Any] | None = trainer.preprocess_logits_for_metrics
    return logits if prepare is None else prepare(logits, labels)


def _get_ignored_keys(model: Any, ignore_keys: Sequence[str] | None) -> Sequence[str]:
    if ignore_keys is not None:
        return ignore_keys
    config = getattr(model, "config", None)
    return getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"]


def _unwrap_single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _spread(value: Tensor, rows: int) -> Tensor:
    """Spread a sum evenly over `rows` rows."""
    return (value.double() / rows).expand(rows).cpu()


def _repeat_loss(loss: Any, count: Any, samples: int) -> Tensor:
    """Return the mean loss of a batch, repeated for each of its samples."""
    return (loss / count).float().repeat(samples)


def _make_eval_prediction(
    args: Any, logits: Any, labels: Any, inputs: Any, losses: Any
) -> EvalPrediction:
    """Return the values requested by `compute_metrics`: arrays, or tensors of a batch."""
    wanted = args.include_for_metrics
    return EvalPrediction(
        predictions=logits,
        label_ids=labels,
        inputs=inputs if "inputs" in wanted else None,
        losses=losses if "loss" in wanted else None,
    )
