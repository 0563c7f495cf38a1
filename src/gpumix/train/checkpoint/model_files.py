"""Configurations of `transformers` models in checkpoints and exports. Imports no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def dump_model_config(model: nn.Module) -> dict[str, Any] | None:
    """Return the configuration of a `transformers` model as JSON; None for other models. Numbers
    that are not finite appear as in files of transformers."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return None
    told = json.loads(config.to_json_string(use_diff=False))
    return {**told, "architectures": [type(model).__name__]}


def dump_model_files(model: nn.Module) -> dict[str, Any]:
    """Return a checkpoint's files of a `transformers` model in addition to weights: `model_config`,
    and `generation_config` if the model generates text. Empty for other models."""
    config = dump_model_config(model)
    if config is None:
        return {}
    found = {"model_config": config}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():  # type: ignore[operator]
        found["generation_config"] = json.loads(generation.to_json_string())
    return found
