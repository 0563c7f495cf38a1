"""`from_pretrained` without the weights: models of transformers on the meta device, with the way to
their values.

No process makes the whole model. Once a plan is made, each rank reads the parts that it stores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, partialmethod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from gpumix.engine.weights.file_parameter import has_source, read_values
from gpumix.engine.weights.safetensors_files import (
    INDEX_SUFFIX,
    SUFFIX,
    WHOLE_FILE,
    SafetensorsFiles,
    check_are_there,
    find_snapshot,
    make_pickle_error,
)
from gpumix.engine.weights.transformers_loading import LoadingRecorder
from gpumix.engine.weights.whole_values import read_all_values
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.integrations.common.optional_dependency import require_attributes, require_packages
from gpumix.integrations.loading.missing_parameters import pretend_on_host
from gpumix.integrations.loading.peft_layers import patch_peft, wrap_method
from gpumix.schema.errors import InputError, get_first_line

TESTED = ">=5.15,<6"
LOAD, INITIALISE = "_load_pretrained_model", "_initialize_missing_keys"  # of PreTrainedModel
COMPARED_ELEMENTS = 1 << 24  # of two tensors at a time


def from_pretrained(name_or_folder: str | Path, cls: Any = None, **kwargs: Any) -> Any:
    """Load a model of transformers without its weights, which ranks read when they are sharded.

    Args:
        name_or_folder: a model's name on the hub, the folder of its files, or its folder in the
            hub's cache.
        cls: class of transformers; default: `AutoModelForCausalLM`.
        kwargs: as of the class's `from_pretrained`.

    Raises:
        InputError: the files cannot be read, or belong to another model.
        MachineError: transformers is missing.
    """
    with lazy_weights():
        if cls is None:
            from transformers import AutoModelForCausalLM

            cls = AutoModelForCausalLM
        folder = Path(name_or_folder)
        named = find_snapshot(folder) if folder.is_dir() else name_or_folder
        return cls.from_pretrained(named, **kwargs)


@contextmanager
def lazy_weights() -> Iterator[None]:
    """Let `from_pretrained` of transformers, inside the context, leave weights in their files.

    Parameters that files lack get their values at once, and so do buffers; both as without the
    context. Models go to `Trainer`, `SFTTrainer` or `Accelerator` of gpumix, with adapters or not,
    or to `gpumix.prepare`. Until then they compute nothing.

    Raises:
        InputError: inside, by `from_pretrained`: the files cannot be read, or belong to another
            model.
        MachineError: transformers is missing.
    """
    require_packages("gpumix.lazy_weights", "transformers", extra="trainer")
    from transformers import PreTrainedModel

    require_attributes(PreTrainedModel, [LOAD, INITIALISE], package="transformers", tested=TESTED)
    patch_peft()
    _teach_transformers()
    ours = {
        LOAD: staticmethod(partial(_load, getattr(PreTrainedModel, LOAD))),
        INITIALISE: partialmethod(_initialise, getattr(PreTrainedModel, INITIALISE)),
    }
    with replace_attributes(PreTrainedModel, **ours):
        try:
            yield
        except SafetensorError as error:  # by transformers itself, which looks for a dtype
            raise InputError(
                "cannot read the weights",
                code="weights-unreadable",
                why=get_first_line(error),
                fix=WHOLE_FILE,
            ) from error


def _load(
    stock: Callable[..., Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: Sequence[str] | None,
    load_config: Any,
    **more: Any,
) -> Any:
    """Load a model as transformers' function does, without values of parameters."""
    if state_dict is not None or not checkpoint_files:
        return stock(model, state_dict, checkpoint_files, load_config, **more)
    _check_places(load_config)
    files = [Path(file) for file in checkpoint_files]
    for file in files:
        if file.suffix != SUFFIX:
            raise make_pickle_error(file)
    check_are_there(files, files[0].parent / f"model{INDEX_SUFFIX}")
    found = SafetensorsFiles(files[0].parent, files)
    info = LoadingRecorder(model).load(found, load_config)
    _check_loaded(info, load_config, found.path)
    _tie_equal_parameters(model, info.missing_keys)
    return info, None


def _initialise(model: Any, stock: Callable[..., None], *given: Any, **named: Any) -> None:
    """Initialise the parameters that files lack, by transformers' method."""
    with pretend_on_host(model):
        stock(model, *given, **named)


def _check_places(load_config: Any) -> None:
    """Refuse a model that is to be spread over devices."""
    places = {str(place) for place in (load_config.device_map or {}).values()}
    if len(places) > 1 or "disk" in places or load_config.device_mesh is not None:
        raise InputError(
            "a model whose weights stay in files cannot be spread over devices",
            code="model-in-files-dispatched",
            why="the plan says which device stores what",
            fix="load it without device_map and distributed_config",
        )


def _check_loaded(info: Any, load_config: Any, path: Path) -> None:
    """Refuse weights of another model."""
    if info.mismatched_keys and not load_config.ignore_mismatched_sizes:
        name, found, wanted = min(info.mismatched_keys)
        raise InputError(
            "the weights are those of another model",
            code="weights-of-another-model",
            where=str(path),
            why=f"'{name}' has shape {tuple(found)} there, and {tuple(wanted)} in the model",
            fix="take the model's configuration next to the weights (config.json); or "
            "ignore_mismatched_sizes=True, to begin such parameters anew",
        )
    if info.conversion_errors:
        name, told = min(info.conversion_errors.items())
        raise InputError(
            f"transformers cannot convert the weights of '{name}'",
            code="weights-not-convertible",
            where=str(path),
            why=told.strip().splitlines()[-1],
            fix="take the model's configuration next to the weights (config.json)",
        )


def _tie_equal_parameters(model: Any, missing: set[str]) -> None:
    """Decide which parameters stay tied that files hold twice: as without values nobody can, those
    with equal values."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in missing or source in missing:
            continue
        one, other = model.get_parameter(source), model.get_parameter(target)
        if not (has_source(one) and has_source(other)):
            continue
        if _are_equal(one, other):
            missing.add(target)
        else:
            from transformers.utils import logging

            del model.all_tied_weights_keys[target]
            logging.get_logger("transformers.modeling_utils").warning(
                f"'{target}' is not tied to '{source}': the files hold both, with other values"
            )


@cache
def _teach_transformers() -> None:
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


def _are_equal(one: nn.Parameter, other: nn.Parameter) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    for start in range(0, one.numel(), COMPARED_ELEMENTS):
        end = min(one.numel(), start + COMPARED_ELEMENTS)
        if not torch.equal(*(read_values("", p, start, end) for p in (one, other))):
            return False
    return True
