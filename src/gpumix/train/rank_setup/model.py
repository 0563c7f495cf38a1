"""Models of jobs: a `transformers` configuration, or a factory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gpumix.data.core.factory import call_factory
from gpumix.data.core.tokenizer import open_tokenizer
from gpumix.engine.model.deferred_init import build
from gpumix.schema.errors import (
    GpumixError,
    InputError,
    MachineError,
    NoFeasiblePlanError,
    format_install_command,
    get_first_line,
)
from gpumix.schema.files import read_text
from gpumix.schema.job.job import MOST_LAYERS, Job, ModelSpec
from gpumix.schema.reading.error_text import did_you_mean, find_nearest
from gpumix.train.rank_setup.adapters import add_adapters

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LONGEST_WHY = 300
# Keys accepted by configurations without a value of that name.
EXTRA_CONFIG_KEYS = (
    "add_cross_attention", "architectures", "attn_implementation", "auto_map",
    "bos_token_id", "cross_attention_hidden_size", "decoder_start_token_id", "dtype",
    "eos_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "is_decoder", "is_encoder_decoder", "label2id", "num_labels", "output_attentions",
    "output_hidden_states", "pad_token_id", "partial_rotary_factor", "problem_type",
    "pruned_heads", "quantization_config", "return_dict", "rope_parameters", "rope_scaling",
    "rope_theta", "rotary_emb_base", "rotary_pct", "sep_token_id", "task_specific_params",
    "tie_word_embeddings", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip

_AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}


def build_model(spec: ModelSpec, *, folder: Path, seed: int) -> nn.Module:
    """Build the model, without its large tensors (see `engine.model.deferred_init`).

    Raises:
        InputError: the configuration is invalid, or the factory returns no module.
        NoFeasiblePlanError: an emulated device has too little memory for small tensors and buffers.
        MachineError: transformers is not installed.
    """

    def adapted(make: Callable[[], nn.Module]) -> nn.Module:
        return make() if spec.lora is None else add_adapters(make(), spec)

    if spec.factory is not None:
        of_factory = partial(_call_model_factory, spec.factory, spec.arguments, folder)
        return build(partial(adapted, of_factory), seed)
    config = make_config(spec)
    auto_class = getattr(_import_transformers(), _AUTO_CLASSES[spec.task])
    try:
        return build(partial(adapted, partial(auto_class.from_config, config)), seed)
    except GpumixError:
        raise
    except torch.OutOfMemoryError as error:  # of a device; hosts raise other errors
        raise NoFeasiblePlanError(
            "a device has not even the memory in which a model is built",
            code="model-does-not-fit-to-build",
            why=get_first_line(error),
            fix="give its class more memory, or leave it out of the cluster",
        ) from error
    except Exception as error:  # sizes that are negative, huge or inconsistent
        raise InputError(
            f"transformers cannot build a {spec.task} model of this configuration",
            code="model-task-unsupported",
            where=f"model.config of type '{config.model_type}'",
            why=get_first_line(error),
        ) from error


def _call_model_factory(factory: str, arguments: Mapping[str, Any], folder: Path) -> nn.Module:
    model = call_factory(factory, arguments, folder, key="model")
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the factory returned a {type(model).__name__}, not a torch.nn.Module",
            code="factory-returned-no-module",
            where=factory,
        )
    return model


def _refuse_code_of_hubs(values: Mapping[str, Any], where: str) -> None:
    """Raise InputError if a configuration names kernels of a hub, which transformers would download
    and run."""
    for key, value in values.items():
        if key.endswith("_implementation") and "/" in str(value):
            raise InputError(
                f"'model.config.{key}' is '{value}', which is code of a hub",
                code="model-config-code",
                where=where,
                why="a configuration may come from anybody, and brings no code",
                fix=f"leave out `{key}`, or give one of transformers, such as sdpa",
            )
        if isinstance(value, dict):
            _refuse_code_of_hubs(value, where)


def make_config(spec: ModelSpec) -> PretrainedConfig:
    """Return the `transformers` configuration of a job's model.

    Raises:
        InputError: unknown model type, or invalid values.
    """
    values = _read_config_values(spec)
    model_type = values.pop("model_type", None)
    where = f"model.config of type '{model_type}'"
    types = list(_import_transformers().CONFIG_MAPPING)
    if model_type not in types:
        raise InputError(
            f"transformers {_import_transformers().__version__} knows no model of type "
            f"'{model_type}'",
            code="model-type-unknown",
            where="model.config.model_type",
            fix=did_you_mean(find_nearest(str(model_type), types))
            or "python -c 'import transformers; print(*transformers.CONFIG_MAPPING)' shows those "
            "that it knows",
        )
    for key, value in values.items():
        if "layer" in key and isinstance(value, int) and value > MOST_LAYERS:
            raise InputError(
                f"'model.config.{key}' is {value}, models have {MOST_LAYERS} layers at most",
                code="model-layers-out-of-range",
                where=where,
                fix=f"correct `{key}` in the configuration",
            )
    _refuse_code_of_hubs(values, where)
    make = _import_transformers().AutoConfig.for_model
    try:
        config, usual = make(model_type, **values), make(model_type)
    except Exception as error:  # each model type checks its values in its own way
        raise InputError(
            "this is no valid transformers configuration",
            code="model-config-invalid",
            where=where,
            why=shorten(str(error), LONGEST_WHY, placeholder=" …"),
        ) from error
    shown = [*usual.to_dict(), *config.attribute_map]
    known = {*shown, *EXTRA_CONFIG_KEYS}
    unknown = [key for key in values if key not in known]
    # A config.json may contain keys of other tools.
    if unknown and isinstance(spec.config, dict):
        raise InputError(
            f"unknown key 'model.config.{unknown[0]}'",
            code="model-config-key-unknown",
            where=where,
            fix=did_you_mean(find_nearest(unknown[0], known)) or f"valid keys: {', '.join(shown)}",
        )
    return config


def check_model_fits_data(job: Job, folder: Path) -> None:
    """Check that a `transformers` model has room for every position and token of the job's data.
    Unchecked, the run fails midway, on a GPU without a message.

    Raises:
        InputError: too few positions, or too small a vocabulary.
    """
    if job.model.config is None:
        return
    config = make_config(job.model).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < job.sequence_length:
        raise InputError(
            f"the model has {positions} positions, sequence_length is {job.sequence_length}",
            code="sequence-exceeds-positions",
            where="model.config",
            fix="raise max_position_embeddings (n_positions in GPT-2) or lower sequence_length",
        )
    if job.data.factory is not None:
        return
    named = job.tokenizer
    tokenizer = open_tokenizer(folder / named if isinstance(named, Path) else named)
    vocabulary = _vocabulary(config)
    if vocabulary is not None and vocabulary < tokenizer.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocabulary}",
            code="vocabulary-exceeds-model",
            where="model.config",
            fix=f"set vocab_size of model.config to {tokenizer.vocab_size} or more",
        )


def attention_cost(model: nn.Module) -> float:
    """Return the cost of a pair of tokens relative to a token's: `4 * width` over `24 * width**2`,
    for a transformer block with an MLP of four times its width; 0 if the width is unknown."""
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    return 1 / (6 * width) if isinstance(width, int) and width > 0 else 0.0


def get_vocabulary_size(spec: ModelSpec) -> int | None:
    """Return the vocabulary size of a `transformers` model; None if not configured."""
    return None if spec.config is None else _vocabulary(make_config(spec).get_text_config())


def _vocabulary(config: PretrainedConfig) -> int | None:
    found = getattr(config, "vocab_size", None)
    return found if isinstance(found, int) else None


def _read_config_values(spec: ModelSpec) -> dict[str, Any]:
    if isinstance(spec.config, Path):
        return dict(json.loads(read_text(spec.config)))
    return dict(spec.config or {})


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MachineError(
            "`model.config` needs the package transformers",
            code="package-missing",
            fix="name a factory with `model.factory`, or " + format_install_command("transformers"),
        ) from error
    transformers.logging.set_verbosity_error()
    return transformers
