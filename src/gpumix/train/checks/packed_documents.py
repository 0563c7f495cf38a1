"""Check of attention across packed documents, with the model's own attention, on the run's devices.

Two documents are packed into a sample, and only the second has a loss. If this loss changes with
the first document, attention crosses documents, and a run would silently learn something else.
"""

from __future__ import annotations

import torch

from gpumix.engine.engine import Engine
from gpumix.schema.errors import InputError

_MOST_TOKENS = 8  # tokens of each document, at most
_FIRST_DOCUMENTS = ([0, 1, 2, 3] * 2, [3, 2, 1, 0] * 2)
_SECOND_DOCUMENT = [1, 0, 2, 1, 3, 0, 2, 2]
# Without attention across documents only experts change the loss, rounding by token counts.
_ROUNDING = 1e-6  # of the loss
_LEAK_SHARE = 0.02  # of the change with attention across documents


def check_documents(engine: Engine) -> str:
    """Refuse attention across documents. Collective; four evaluations of short samples.

    Returns:
        A warning if undecidable, because the model does not attend to earlier tokens yet.

    Raises:
        InputError: attention crosses documents.
    """
    length = min(_MOST_TOKENS, engine.plan.sequence_length // 2)  # the model has no more positions
    together, apart = list(range(2 * length)), list(range(length)) * 2
    one, other = (_evaluate_second(engine, first, together) for first in _FIRST_DOCUMENTS)
    seen = abs(one - other)
    one, other = (_evaluate_second(engine, first, apart) for first in _FIRST_DOCUMENTS)
    if abs(one - other) > max(_ROUNDING * abs(one), _LEAK_SHARE * seen):
        raise InputError(
            "this model lets documents that are packed into one sample see each other",
            code="packed-documents-mixed",
            where="data.packing: documents",
            why=f"the loss of a document went from {one:.6f} to {other:.6f} with another one "
            "before it",
            fix="set data.packing to none or concatenate; or, where the model has "
            "`attn_implementation: flash_attention_2`, take sdpa",
        )
    if seen > _ROUNDING * abs(one):
        return ""
    return (
        "whether packed documents see each other cannot be told: with these weights the model does "
        "not look at earlier tokens at all"
    )


def _evaluate_second(engine: Engine, first: list[int], positions: list[int]) -> float:
    """Return the loss of the second document after `first`."""
    length = len(positions) // 2
    tokens = torch.tensor([*first[:length], *_SECOND_DOCUMENT[:length]])
    labels = tokens.clone()
    labels[: length + 1] = -100
    sample = {"input_ids": tokens, "labels": labels, "position_ids": torch.tensor(positions)}
    rows = sum(map(len, engine.plan.rows_of(engine.comm.rank)))
    return engine.evaluate({key: t.repeat(rows, 1) for key, t in sample.items()}).item()
