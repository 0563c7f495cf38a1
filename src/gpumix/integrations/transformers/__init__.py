"""transformers' `Trainer` for devices of unlike types, with equal arguments and results.

    from gpumix.integrations.transformers import Trainer      # instead of: from transformers

Start the script with a process per device: `gpumix launch SCRIPT`, or torchrun. A step's samples
are those of all devices together; a plan decides how many each device computes.
"""

from __future__ import annotations

import logging

from gpumix.integrations.common.optional_dependency import require_attributes, require_packages

require_packages(__name__, "transformers", "accelerate", extra="trainer")

import transformers  # noqa: E402 - a missing package is reported first

from gpumix.integrations.transformers.arguments import SEQ2SEQ_FIELDS  # noqa: E402
from gpumix.integrations.transformers.trainer_mixin import (  # noqa: E402
    ARGUMENTS,
    REPLACED_PRIVATE_METHODS,
    PlannedTrainerMixin,
)
from gpumix.profiler.api import announce_cpu_ranks  # noqa: E402

TESTED_VERSIONS = ">=5.15,<6"
require_attributes(
    transformers.Trainer, REPLACED_PRIVATE_METHODS, package="transformers", tested=TESTED_VERSIONS
)
require_attributes(
    transformers.TrainingArguments, ARGUMENTS, package="transformers", tested=TESTED_VERSIONS
)

announce_cpu_ranks()


def _is_apt(record: logging.LogRecord) -> bool:
    """Return False for the advice to launch by torch, of a group that gpumix has made for one
    process."""
    return "parallel_mode != ParallelMode.DISTRIBUTED" not in str(record.msg)


logging.getLogger("transformers.training_args").addFilter(_is_apt)

__all__ = ["Seq2SeqTrainer", "Trainer"]


class Trainer(PlannedTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` training by a plan; see `PlannedTrainerMixin` for additional
    arguments."""


class Seq2SeqTrainer(PlannedTrainerMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` training by a plan."""

    _arguments = (transformers.Seq2SeqTrainingArguments, SEQ2SEQ_FIELDS)
