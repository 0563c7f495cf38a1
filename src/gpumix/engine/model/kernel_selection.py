"""Applies the chosen efficiency options of a device to a model: attention, kernels, TF32.

`hardware.estimates.kernel_choice` chooses, `profiler.compute.numerics_check` checks. Only objects
of this model are changed, never classes or modules of a library, which all models in the process
share. TF32 alone is a setting of torch for the process: it is switched on where chosen, never off.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpumix.schema.cluster.kernels import KernelSettings
from gpumix.schema.errors import InputError, MachineError, get_first_line

_GATED_MLP_NAMES = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ATTENTION_IMPLEMENTATIONS = {
    "sdpa": "sdpa",
    "flash": "flash_attention_2",
    "eager": "eager",
}  # in transformers


def apply_efficiency(model: nn.Module, efficiency: KernelSettings, device: torch.device) -> None:
    """Apply options to `model` on `device`, with unchanged parameters.

    Raises:
        InputError: the model does not support the attention.
        MachineError: a package is missing.
    """
    if efficiency.tf32 and device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if efficiency.attention != "own":
        _set_attention(model, ATTENTION_IMPLEMENTATIONS[efficiency.attention])
    if efficiency.kernels == "liger":
        _use_liger(model)


def to_channels_last(tensor: Tensor) -> Tensor:
    """Convert images [samples, channels, height, width] to the layout that tensor cores prefer."""
    if tensor.dim() != 4 or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _set_attention(model: nn.Module, name: str) -> None:
    choose: Any = getattr(model, "set_attn_implementation", None)
    if choose is None:
        raise InputError(
            "the model has no choice of attention",
            code="attention-not-selectable",
            why="only models of transformers can switch their attention",
            fix="leave `advanced.efficiency.attention` out",
        )
    try:
        choose(name)
    except (ValueError, ImportError) as error:
        raise InputError(
            f"the model has no attention '{name}'",
            code="attention-unknown",
            why=get_first_line(error),
        ) from error


def _use_liger(model: nn.Module) -> None:
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise MachineError(
            "Liger's kernels are not installed",
            code="package-missing",
            why=str(error),
            fix="pip install liger-kernel",
        ) from error
    for module in model.modules():
        if _is_rms_norm(module):
            module.forward = partial(_liger_norm, LigerRMSNormFunction, module)  # type: ignore[assignment, method-assign]
        elif _is_gated(module):
            module.forward = partial(_liger_gate, LigerSiLUMulFunction, module)  # type: ignore[assignment, method-assign]


def _is_rms_norm(module: nn.Module) -> bool:
    """Return whether a module is an RMSNorm as in Llama. Gemma's adds 1 to the weight, T5's has its
    epsilon elsewhere."""
    name = type(module).__name__
    return name.endswith("RMSNorm") and "Gemma" not in name and hasattr(module, "variance_epsilon")


def _is_gated(module: nn.Module) -> bool:
    """Return whether a module is exactly three linear layers around a product with SiLU. A dropout
    or a clamp would be lost, and agreement on one sample does not show it."""
    forward: Any = inspect.unwrap(type(module).forward)
    if not _GATED_MLP_NAMES.issuperset(forward.__code__.co_names):
        return False
    layers = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    act = getattr(module, "act_fn", None)
    silu = isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"
    return silu and all(isinstance(layer, nn.Linear) for layer in layers)


def _liger_norm(function: Any, module: Any, hidden: Tensor) -> Tensor:
    # Weight offset 0, casts like Llama's, gradients in separate memory.
    found: Tensor = function.apply(
        hidden, module.weight, module.variance_epsilon, 0.0, "llama", False
    )
    return found


def _liger_gate(function: Any, module: Any, hidden: Tensor) -> Tensor:
    product = function.apply(module.gate_proj(hidden), module.up_proj(hidden))
    found: Tensor = module.down_proj(product)
    return found
