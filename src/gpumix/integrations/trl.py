"""`SFTTrainer` of TRL, on devices that are not alike: the same arguments, the same results.

from gpumix.integrations.trl import SFTTrainer      # instead of: from trl
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager

from gpumix.integrations.missing import need

need(__name__, "trl", "transformers", "accelerate", extra="trl")

import trl  # noqa: E402 - what is missing is told first

from gpumix.integrations.fields import Fields, no_meaning  # noqa: E402
from gpumix.integrations.gathering import all_texts  # noqa: E402
from gpumix.integrations.trainer.arguments import PLANNED, TRAINING  # noqa: E402
from gpumix.integrations.trainer.planned import Planned  # noqa: E402

__all__ = ["SFTTrainer"]

TOKENS = "num_tokens"
PACKED = "SFTConfig(packing=True, packing_strategy='wrapped') packs in the dataset"
ARGUMENTS = Fields.of(
    heard="packing packing_strategy",
    theirs="""
        model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path
        dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token max_length
        truncation_mode shuffle_dataset pad_to_multiple_of eval_packing completion_only_loss
        assistant_only_loss loss_type ddp_find_unused_parameters
    """,  # the last one is set by TRL itself for models that look at pictures
    refused={
        "activation_offloading": PLANNED,
        "padding_free": f"leave it out: a batch is cut between its rows; {PACKED}",
    },
).and_of(TRAINING)


class SFTTrainer(Planned, trl.SFTTrainer):
    """`trl.SFTTrainer`, run by a plan; see `Planned` for what it takes beside.

    Its metrics are means over the micro-batches of all devices.
    """

    _arguments = (trl.SFTConfig, ARGUMENTS)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self.args.packing and self.args.packing_strategy != "wrapped":
            raise no_meaning(
                f"packing_strategy={self.args.packing_strategy!r}", PACKED, where="SFTConfig"
            )

    @contextmanager
    def _measured(self) -> Iterator[None]:
        before = copy.deepcopy(self._metrics), self._total_train_tokens
        try:
            yield
        finally:
            self._metrics, self._total_train_tokens = before

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._engine is not None:
            mode = "train" if self.model.training else "eval"
            own = self._metrics[mode]
            told = {**own, TOKENS: [self._total_train_tokens]}
            every = [
                json.loads(text)
                for text in all_texts(json.dumps(told), self._engine.comm, "gathering of metrics")
            ]
            for name in sorted({name for one in every for name in one} - {TOKENS}):
                own[name] = [value for one in every for value in one.get(name, [])]
            own[TOKENS] = [sum(sum(one[TOKENS]) for one in every)]
        super().log(logs, start_time)
