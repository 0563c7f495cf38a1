"""Methods of transformers that need values which are still in files: they read them first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from gpumix.engine.weights.file_parameter import has_source
from gpumix.engine.weights.whole_values import read_all_values
from gpumix.integrations.loading.peft_layers import wrap_method


@cache
def teach_transformers() -> None:
    """Let transformers resize embeddings of models in files, save such models, and load other
    values into them. Other models keep transformers' own code."""
    from transformers import PreTrainedModel

    wrap_method(PreTrainedModel, "resize_token_embeddings", partial(_call, _read_embeddings))
    wrap_method(
        PreTrainedModel,
        "save_pretrained",
        partial(_call, lambda model: read_all_values(copy.deepcopy(model))),
    )
    wrap_method(PreTrainedModel, "load_state_dict", partial(_call, read_all_values))


def _call(
    read: Callable[[Any], Any], method: Callable[..., Any], model: Any, *args: Any, **given: Any
) -> Any:
    """Call a method of the model that `read` returns for a model in files."""
    whole = read(model) if any(map(has_source, model.parameters())) else model
    return method(whole, *args, **given)


def _read_embeddings(model: Any) -> Any:
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    chosen = {p for table in tables if table is not None for p in table.parameters()}
    return read_all_values(model, chosen)
