"""TRL's `SFTTrainer` for devices of unlike types, with equal arguments and results.

from gpumix.integrations.trl import SFTTrainer      # instead of: from trl
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpumix.integrations.common.optional_dependency import require_packages

require_packages(__name__, "trl", "transformers", "accelerate", extra="trl")

import torch  # noqa: E402 - a missing package is reported first
import trl  # noqa: E402
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # noqa: E402

from gpumix.engine.batch.batch_split import IGNORED_LABEL  # noqa: E402
from gpumix.engine.engine import Engine  # noqa: E402
from gpumix.engine.model.document_mask import make_document_mask  # noqa: E402
from gpumix.integrations.common.gather import gather_texts  # noqa: E402
from gpumix.integrations.common.unsupported_arguments import FieldSupport  # noqa: E402
from gpumix.integrations.transformers.arguments import (  # noqa: E402
    FIX_PLAN_DECIDES,
    TRAINING_FIELDS,
)
from gpumix.integrations.transformers.trainer_mixin import PlannedTrainerMixin  # noqa: E402
from gpumix.profiler.api import announce_cpu_ranks  # noqa: E402
from gpumix.schema.errors import InputError, convert_error  # noqa: E402
from gpumix.schema.plan.plan import Plan  # noqa: E402
from gpumix.train.checks.packed_documents import check_documents  # noqa: E402
from gpumix.train.processes.script_errors import show_errors_without_traceback  # noqa: E402

announce_cpu_ranks()

__all__ = ["SFTTrainer"]

TOKENS_KEY, TOTAL_TOKENS_KEY = "num_tokens", "tokens of this rank"
SUMS_KEY = "sums of this rank"
TOKEN_MEANS = ("entropy", "mean_token_accuracy")  # TRL's means over the tokens of a batch
SFT_FIELDS = FieldSupport.of(
    heard="packing packing_strategy",
    theirs="""
        model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path
        dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token max_length
        truncation_mode shuffle_dataset pad_to_multiple_of eval_packing completion_only_loss
        assistant_only_loss loss_type ddp_find_unused_parameters
    """,  # TRL itself sets the last for models with image inputs
    refused={
        "activation_offloading": FIX_PLAN_DECIDES,
        "padding_free": "leave it out: a batch is cut between its rows; SFTConfig(packing=True) "
        "lays several samples into each",
    },
).merge_base(TRAINING_FIELDS)


def __getattr__(name: str) -> Any:
    """Refuse TRL's other trainers by name."""
    if name.endswith("Trainer") and hasattr(trl, name):
        show_errors_without_traceback()
        raise InputError(
            f"gpumix has no {name}",
            code="trl-trainer-unsupported",
            where=f"from {__name__} import {name}",
            why="of TRL's trainers it runs SFTTrainer, whose loss is a sum over the tokens of one "
            "call of the model",
            fix=f"from trl import {name}, on equal devices; or give its loss to gpumix.prepare, "
            "and compute the values of a reference model before, into the data set",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class RowPerPackCollator:
    """Collator like TRL's, with a row per pack, so a batch is cut between packs. Positions restart
    at each document, and there is no mask.

    Attributes:
        flat: TRL's collator, which puts all packs of a batch into a single row.
    """

    flat: DataCollatorForLanguageModeling

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = replace(self.flat, padding_free=False, return_position_ids=True)(examples)
        batch[TOKENS_KEY] = batch.pop("attention_mask").sum(1)
        batch["labels"][batch["position_ids"] == 0] = -100
        return batch


class SingleForwardModel:
    """Model for TRL's loss, giving logits and the results of TRL's fused head from a single
    forward: a micro-batch runs through the units once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._outputs: Any = None

    def __call__(self, *, fused_lm_head: bool = False, **inputs: Any) -> Any:
        labels = inputs.pop("labels", None) if fused_lm_head else None
        if self._outputs is None:
            self._outputs = self._model(**inputs)
        if labels is None:
            return self._outputs
        logits, labels = self._outputs.logits[:, :-1].float(), labels[:, 1:]
        counted = labels != IGNORED_LABEL
        every = logits.log_softmax(-1)
        of_labels = every.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        with torch.no_grad():
            entropy = -(every.exp() * every).sum(-1) * counted
        return SimpleNamespace(
            log_probs=of_labels.masked_fill(~counted, 0.0),
            entropy=entropy,
            is_top1=(logits.argmax(-1) == labels) & counted,
            label_mask=counted,
            aux_loss=getattr(self._outputs, "aux_loss", None),
        )


class SFTTrainer(PlannedTrainerMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` training by a plan. Entropy and accuracy are means over the tokens of each
    batch, as in TRL; other metrics are means over the micro-batches of all devices.

    Args:
        plan: a plan, or the file of a plan; by default the devices are measured and a plan is made
            when first needed.
    """

    _arguments = (trl.SFTConfig, SFT_FIELDS)

    def __init__(self, *args: Any, plan: Plan | Path | str | None = None, **kwargs: Any) -> None:
        self._tokens = 0  # trained on, of packs
        self._batches = 0  # seen, of all devices
        self._sums = _TokenSums()
        super().__init__(*args, plan=plan, **kwargs)
        if self.padding_free:  # set by TRL for packing, except "wrapped"
            assert isinstance(self.data_collator, DataCollatorForLanguageModeling)
            self.data_collator = RowPerPackCollator(self.data_collator)

    def _hosted(self, dataset: Any, collate: Any) -> Engine:
        known = self._engine
        engine = super()._hosted(dataset, collate)
        if self.padding_free and engine is not known:
            with self._loss.in_one_process(), self._measured():
                self.accelerator.print(_check_packing(engine, self.args.packing_strategy))
        return engine

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss, also of packs, without attention between documents."""
        counted = int((inputs["labels"][:, 1:] != IGNORED_LABEL).sum())
        if return_outputs or self.compute_loss_func is not None or self.label_smoother is not None:
            model = SingleForwardModel(model)
        given, tokens = inputs, torch.zeros(())
        if self.padding_free:
            tokens = inputs.pop(TOKENS_KEY, tokens)
            peft = hasattr(self.model, "peft_config")
            whole = self.model.get_base_model() if peft else self.model
            given = inputs | make_document_mask(whole, inputs)
        made = super().compute_loss(model, given, return_outputs, num_items_in_batch)
        self._take_means(counted)
        if self.padding_free and self.model.training:
            # TRL counts a single row, and other micro-batches run in between.
            self._tokens += int(tokens.sum())
            self._total_train_tokens = self._tokens
        return made

    def _take_means(self, counted: int) -> None:
        """Move TRL's means over the `counted` tokens of a micro-batch to the sums of its batch."""
        own = self._metrics["train" if self.model.training else "eval"]
        for name in TOKEN_MEANS:
            self._sums.add(name, self._batches, own[name].pop() * counted, counted)

    def _settle(self, inputs: Any, *, in_step: bool = False) -> None:
        super()._settle(inputs, in_step=in_step)
        self._batches += 1

    @contextmanager
    def _measured(self) -> Iterator[None]:
        before = copy.deepcopy((self._metrics, self._sums)), self._total_train_tokens, self._tokens
        try:
            yield
        finally:
            (self._metrics, self._sums), self._total_train_tokens, self._tokens = before

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._engine is not None:
            own = self._metrics["train" if self.model.training else "eval"]
            told = {**own, TOTAL_TOKENS_KEY: self._total_train_tokens, SUMS_KEY: self._sums.rows}
            every = self._gather_metrics(self._engine, told)
            for name in sorted({n for one in every for n in one} - {TOTAL_TOKENS_KEY, SUMS_KEY}):
                own[name] = [value for one in every for value in one.get(name, [])]
            means = _TokenSums([row for one in every for row in one[SUMS_KEY]]).means()
            for name in TOKEN_MEANS:
                own.pop(name, None)
            own.update(means)
            self._sums = _TokenSums()
            if TOKENS_KEY in own:
                own[TOKENS_KEY] = [sum(one[TOTAL_TOKENS_KEY] for one in every)]
        super().log(logs, start_time)

    @staticmethod
    def _gather_metrics(engine: Engine, told: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the values of ranks with losses, in order: of a tensor-parallel group, those of
        its first rank."""
        texts = gather_texts(json.dumps(told), engine.comm, "gathering of metrics")
        groups = engine.plan.list_tp_groups(len(engine.plan.stages) - 1)
        return [json.loads(texts[group[0]]) for group in groups]


class _TokenSums:
    """Sums over tokens of micro-batches, for means over the tokens of each batch.

    Attributes:
        rows: name, number of the batch, sum, and number of tokens, of a micro-batch each.
    """

    def __init__(self, rows: Sequence[Sequence[Any]] = ()) -> None:
        self.rows = list(rows)

    def add(self, name: str, batch: int, total: float, count: int) -> None:
        self.rows.append((name, batch, total, count))

    def means(self) -> dict[str, list[float]]:
        """Return the mean of each batch, in order; 0 for a batch without tokens."""
        of_batch: dict[tuple[str, int], list[float]] = {}
        for name, batch, total, count in self.rows:
            known = of_batch.setdefault((name, batch), [0.0, 0])
            known[0] += total
            known[1] += count
        found: dict[str, list[float]] = {}
        for (name, _), (total, count) in sorted(of_batch.items()):
            found.setdefault(name, []).append(total / count if count else 0.0)
        return found


def _check_packing(engine: Engine, strategy: str) -> str:
    """Return a message on packed documents; raise InputError if they attend to each other."""
    try:
        warning = check_documents(engine)
    except InputError as error:
        raise convert_error(
            error,
            InputError,
            where=f"SFTConfig: packing_strategy={strategy!r}",
            fix="take packing_strategy='wrapped' or packing=False; or, where the model has "
            "attn_implementation='flash_attention_2', 'sdpa'",
        ) from error
    return warning or "packed documents do not see each other"
