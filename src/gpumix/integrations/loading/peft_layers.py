"""Adapters of PEFT on layers whose weights are still in files.

PEFT puts an adapter where its layer's weight is, and begins some kinds with values of that weight.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from gpumix.engine.quantised.weight_formats import find_format
from gpumix.engine.weights.file_parameter import has_source
from gpumix.engine.weights.whole_values import with_values

CPU = torch.device("cpu")


@cache
def teach_peft() -> None:
    """Let PEFT treat layers whose weights are in files as it treats others. Others it treats as
    before."""
    if find_spec("peft") is None:
        return
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not hasattr(BaseTunerLayer, "_get_base_layer_device_and_dtype"):
        return  # its adapters get no values there, and are refused for that
    look: Any = BaseTunerLayer._get_base_layer_device_and_dtype
    update: Any = DoraLinearLayer.update_layer

    def get_device_and_dtype(self: Any, base_layer: Any) -> tuple[Any, Any]:
        device, dtype = look(self, base_layer)
        weight = getattr(base_layer, "weight", None)
        if not has_source(weight):
            return device, dtype
        quantised = find_format(weight) is not None and not hasattr(base_layer, "compute_dtype")
        return CPU, torch.uint8 if quantised else dtype

    def update_layer(self: Any, *, base_layer: Any, **given: Any) -> None:
        with with_values(base_layer):
            update(self, base_layer=base_layer, **given)

    setattr(BaseTunerLayer, "_get_base_layer_device_and_dtype", get_device_and_dtype)  # noqa: B010
    setattr(DoraLinearLayer, "update_layer", update_layer)  # noqa: B010
