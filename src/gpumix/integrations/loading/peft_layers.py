"""Adapters of PEFT on layers whose weights are still in files.

PEFT puts an adapter where its layer's weight is, and begins some kinds with values of that weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch

from gpumix.engine.weights.file_parameter import has_source
from gpumix.engine.weights.whole_values import with_values
from gpumix.hardware.host.replaced_attributes import replace_attributes

CPU = torch.device("cpu")
LOOK = "_get_base_layer_device_and_dtype"


@cache
def patch_peft() -> None:
    """Let PEFT put adapters on layers with weights in files. Other layers keep PEFT's own code."""
    if find_spec("peft") is None:
        return
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.tuners.lora.model import LoraModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

    if not hasattr(BaseTunerLayer, LOOK):
        return  # its adapters get no values there, and are refused for that
    wrap_method(BaseTunerLayer, LOOK, _get_device_and_dtype)
    for kind in (BaseTuner, LoraModel):
        if "_replace_module" in vars(kind):
            wrap_method(kind, "_replace_module", _replace_module)
    wrap_method(DoraLinearLayer, "update_layer", _update_layer)
    wrap_method(BaseTuner, "inject_adapter", _inject_adapter)


def wrap_method(kind: type, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of a class, if there is one, by `function`, which gets the method first."""
    method = getattr(kind, name, None)
    if method is None:
        return

    @wraps(method)
    def wrapped(*args: Any, **given: Any) -> Any:
        return function(method, *args, **given)

    setattr(kind, name, wrapped)


def _get_device_and_dtype(method: Callable[..., Any], layer: Any, base_layer: Any) -> Any:
    """Return where an adapter goes, and its dtype: as if the weight had been loaded."""
    device, dtype = method(layer, base_layer)
    weight: Any = getattr(base_layer, "weight", None)
    if not has_source(weight):
        return device, dtype
    return CPU, dtype


def _inject_adapter(
    method: Callable[..., Any], tuner: Any, model: Any, adapter_name: str, *args: Any, **given: Any
) -> Any:
    """Add adapters. Those that begin with values of a layer's weights, or where they are, find them
    there, a layer at a time."""
    config = tuner.peft_config[adapter_name]
    if not any(map(has_source, model.parameters())) or _begins_without_values(config):
        return method(tuner, model, adapter_name, *args, **given)
    create = tuner._create_and_replace

    def create_with_values(
        config: Any, adapter_name: str, target: Any, *args: Any, **given: Any
    ) -> None:
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        with with_values(base):
            create(config, adapter_name, target, *args, **given)

    with replace_attributes(tuner, _create_and_replace=create_with_values):
        return method(tuner, model, adapter_name, *args, **given)


def _begins_without_values(config: Any) -> bool:
    """Return True for LoRA, if it begins with zeros or random numbers; or with DoRA's lengths, for
    which values are read where they are computed."""
    begin = getattr(config, "init_lora_weights", None)
    return config.peft_type == "LORA" and begin in (True, False, "gaussian", "orthogonal")


def _replace_module(
    method: Callable[..., Any], tuner: Any, parent: Any, name: str, module: Any, child: Any
) -> None:
    """Put a layer with adapters in the place of another one, and leave the adapters where they
    are."""
    held = [(one, dict(one._parameters)) for one in module.modules()]
    method(tuner, parent, name, module, child)
    for owner, parameters in held:
        for key, before in parameters.items():
            now = owner._parameters[key]
            if before is None or now is None or not now.is_meta:
                continue
            if not before.is_meta or (has_source(before) and not has_source(now)):
                owner._parameters[key] = before


def _update_layer(method: Callable[..., Any], layer: Any, *, base_layer: Any, **given: Any) -> None:
    """Begin a layer of DoRA with the lengths of the weight's rows."""
    with with_values(base_layer):
        method(layer, base_layer=base_layer, **given)
