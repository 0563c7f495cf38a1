"""Methods of transformers that need values which are still in files: they read them first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from gpumix.engine.weights.file_parameter import has_source
from gpumix.engine.weights.whole_values import read_all_values


@cache
def teach_transformers() -> None:
    """Let transformers resize embeddings of models in files, save such models, and load other
    values into them. Other models keep transformers' own code."""
    from transformers import PreTrainedModel

    _replace(PreTrainedModel, "resize_token_embeddings", _read_embeddings)
    _replace(PreTrainedModel, "save_pretrained", _copy_with_values)
    _replace(PreTrainedModel, "load_state_dict", read_all_values)


def _replace(kind: type, name: str, read: Callable[[Any], Any]) -> None:
    """Let a method of a class work on the model that `read` returns for a model in files."""
    method = getattr(kind, name)

    @wraps(method)
    def replaced(self: Any, *args: Any, **given: Any) -> Any:
        whole = read(self) if any(map(has_source, self.parameters())) else self
        return method(whole, *args, **given)

    setattr(kind, name, replaced)


def _read_embeddings(model: Any) -> Any:
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    chosen = {p for table in tables if table is not None for p in table.parameters()}
    return read_all_values(model, chosen)


def _copy_with_values(model: Any) -> Any:
    return read_all_values(copy.deepcopy(model))
