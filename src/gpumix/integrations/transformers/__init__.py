"""transformers' `Trainer` for devices of unlike types, with equal arguments and results.

    from gpumix.integrations.transformers import Trainer      # instead of: from transformers

Start the script with a process per device: `gpumix launch SCRIPT`, or torchrun. A step's samples
are those of all devices together; a plan decides how many each device computes.
"""

from __future__ import annotations

from gpumix.integrations.common.optional_dependency import need, need_names

need(__name__, "transformers", "accelerate", extra="trainer")

import transformers  # noqa: E402 - a missing package is reported first

from gpumix.integrations.transformers.arguments import SEQ2SEQ, tell_of_cpus  # noqa: E402
from gpumix.integrations.transformers.trainer_mixin import ARGUMENTS, STANDS_IN_FOR, Planned  # noqa: E402

TESTED = ">=5.15,<6"
need_names(transformers.Trainer, STANDS_IN_FOR, package="transformers", tested=TESTED)
need_names(transformers.TrainingArguments, ARGUMENTS, package="transformers", tested=TESTED)

tell_of_cpus()

__all__ = ["Seq2SeqTrainer", "Trainer"]


class Trainer(Planned, transformers.Trainer):
    """`transformers.Trainer` training by a plan; see `Planned` for additional arguments."""


class Seq2SeqTrainer(Planned, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` training by a plan."""

    _arguments = (transformers.Seq2SeqTrainingArguments, SEQ2SEQ)
