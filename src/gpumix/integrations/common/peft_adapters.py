"""PEFT adapters in a sharded model: PEFT saves and loads adapters by names alone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gpumix.engine.access_between_steps import get_access_between_steps
from gpumix.engine.sharding.state_dict import persistent_buffers
from gpumix.schema.errors import InputError

WEIGHTS_FILE = "adapter_model.safetensors"


@contextmanager
def use_prompt_weights(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Give PEFT's prompt encoders their values of a full state dict, inside the context. PEFT saves
    prompts computed by the encoders."""
    encoders = getattr(model, "prompt_encoder", None)
    if not isinstance(encoders, nn.ModuleDict):
        yield
        return
    before = {}
    for name, module in encoders.named_modules():
        for own in module._parameters:
            key = ".".join(filter(None, ("prompt_encoder", name, own)))
            if key in state:
                before[module, own] = module._parameters[own]
                module._parameters[own] = nn.Parameter(state[key], requires_grad=False)
    try:
        yield
    finally:
        for (module, own), parameter in before.items():
            module._parameters[own] = parameter


def patch_state_dict_names(model: nn.Module, *, everywhere: bool) -> None:
    """Make fully trained modules (`modules_to_save`) report names alone as state, all PEFT needs.

    Args:
        everywhere: on all ranks, not only on the first, which saves.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    for module in _iterate_modules_to_save(model):
        names = _list_state_names(module) if everywhere or first else ()
        module.state_dict = partial(_make_name_dict, names)  # type: ignore[method-assign, assignment]
    outside = get_access_between_steps(model)
    if outside is not None:
        of_model = weakref.ref(model)  # weak: the model refers to the callback
        outside.call_on_unshard(lambda: _unpatch_state_dict(of_model()))


def _unpatch_state_dict(model: nn.Module | None) -> None:
    for module in _iterate_modules_to_save(model) if model is not None else ():
        vars(module).pop("state_dict", None)


def load_adapters(folder: Path, model: Any) -> dict[str, Tensor] | None:
    """Return PEFT's weights of the active adapter in `folder` by the model's names, or None.

    Raises:
        InputError: the adapter consists of prompts.
    """
    if not hasattr(model, "peft_config"):
        return None
    adapter = model.active_adapters[0]
    places = [place for place in (folder / adapter, folder) if (place / WEIGHTS_FILE).is_file()]
    if not places:
        return None
    if model.peft_config[adapter].is_prompt_learning:
        raise InputError(
            "training does not go on from prompts that PEFT saved",
            code="prompts-not-resumable",
            where=str(places[0]),
            why="PEFT saves what it computes from the trained parameters",
            fix="save with save_only_model=False, so that there is a state to load",
        )
    from peft import load_peft_weights, set_peft_model_state_dict

    found: dict[str, Tensor] = {}

    def take(values: Mapping[str, Tensor], strict: bool = True) -> None:
        found.update(values)

    patch_state_dict_names(model, everywhere=True)
    model.load_state_dict, model.state_dict = (
        take,
        partial(_make_name_dict, _list_state_names(model)),
    )
    try:
        saved = load_peft_weights(str(places[0]), device="cpu")
        set_peft_model_state_dict(model, saved, adapter_name=adapter)
    finally:
        del model.load_state_dict, model.state_dict
        patch_state_dict_names(model, everywhere=False)
    return found


def _iterate_modules_to_save(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        kept = getattr(module, "modules_to_save", None)
        if isinstance(kept, nn.ModuleDict):
            yield from kept.values()


def _list_state_names(module: nn.Module) -> Sequence[str]:
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return [*parameters, *persistent_buffers(module)]


def _make_name_dict(names: Sequence[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
    return dict.fromkeys(names)
