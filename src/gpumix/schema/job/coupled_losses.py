"""Values of `couples`: handling of a loss that couples the samples of a batch."""

from __future__ import annotations

NO_RULE = "micro-batch"  # each micro-batch has its own loss, even if coupled
WHOLE_BATCH = "batch"  # each batch is computed at once
HOW_TO_COUPLE = (
    f"couples='{WHOLE_BATCH}' lets one device compute each batch at once, couples='{NO_RULE}' "
    "accepts that each micro-batch has a loss of its own"
)
