"""New sizes of embeddings whose weights are still in files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from gpumix.engine.weights.whole_values import read_all_values

RESIZE = "resize_token_embeddings"


@cache
def teach_resizing() -> None:
    """Let transformers resize embeddings in files, which are read for it. Other models keep
    transformers' own code."""
    from transformers import PreTrainedModel

    method: Callable[..., Any] = getattr(PreTrainedModel, RESIZE)

    @wraps(method)
    def resize(model: Any, *args: Any, **given: Any) -> Any:
        tables = (model.get_input_embeddings(), model.get_output_embeddings())
        chosen = {p for table in tables if table is not None for p in table.parameters()}
        read_all_values(model, chosen)
        return method(model, *args, **given)

    setattr(PreTrainedModel, RESIZE, resize)
