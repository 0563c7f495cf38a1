"""The model that a job names: a `transformers` configuration, or a factory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gpumix.data.factory import call_factory
from gpumix.engine.deferred import build
from gpumix.spec.errors import InputError, MachineError
from gpumix.spec.job import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}


def model_of(spec: ModelSpec, *, folder: Path, seed: int) -> nn.Module:
    """The model, without its large tensors (see `engine.deferred`).

    Raises:
        InputError: the configuration is no valid one, or the factory returns no module.
        MachineError: transformers is not installed.
    """
    if spec.factory is not None:
        factory = spec.factory
        model = build(lambda: call_factory(factory, spec.arguments, folder), seed)
        if not isinstance(model, nn.Module):
            raise InputError(
                f"the factory returned a {type(model).__name__}, not a torch.nn.Module",
                where=factory,
            )
        return model
    config = config_of(spec)
    auto_class = getattr(_transformers(), _AUTO_CLASSES[spec.task])
    try:
        return build(lambda: auto_class.from_config(config), seed)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"transformers cannot build a {spec.task} model of this configuration",
            where=f"model.config of type '{config.model_type}'",
            why=str(error).splitlines()[0],
        ) from error


def config_of(spec: ModelSpec) -> PretrainedConfig:
    """The `transformers` configuration of a job's model.

    Raises:
        InputError: unknown model type, or values that it does not take.
    """
    values = _values(spec)
    model_type = values.pop("model_type", None)
    try:
        return _transformers().AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            "this is no valid transformers configuration",
            where=f"model.config of type '{model_type}'",
            why=str(error).splitlines()[0],
        ) from error


def _values(spec: ModelSpec) -> dict[str, Any]:
    if isinstance(spec.config, Path):
        return dict(json.loads(spec.config.read_text(encoding="utf-8")))
    return dict(spec.config or {})


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MachineError(
            "`model.config` needs the package transformers",
            fix="pip install 'gpumix[transformers]', or name a factory with `model.factory`",
        ) from error
    transformers.logging.set_verbosity_error()
    return transformers
