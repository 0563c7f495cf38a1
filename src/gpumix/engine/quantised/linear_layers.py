"""Linear layers replaced by layers with quantised weights, before any weight is read."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from torch import nn

from gpumix.hardware import runtime
from gpumix.schema.errors import InputError, MachineError, format_install_command, get_first_line

FOUR_BIT = {"nf4": False, "nf4-double": True}  # whether constants are quantised too
INT8_THRESHOLD = 6.0  # activations beyond are computed in 16 bits; transformers' default


def check_library(base: str) -> None:
    """Check that the library of a base is installed, and computes on this machine.

    Raises:
        MachineError: bitsandbytes is missing, too old for CPUs, or has no library for the GPUs.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns in each forward pass
    try:
        import bitsandbytes
    except Exception as error:  # missing, or broken
        raise MachineError(
            f"a base in {base} needs the package bitsandbytes",
            code="package-missing",
            why=get_first_line(error),
            fix=f"leave out `model.base`, or {format_install_command('quantised')}",
        ) from error
    if not hasattr(bitsandbytes.functional, "int8_vectorwise_dequant"):
        raise MachineError(
            f"bitsandbytes {bitsandbytes.__version__} is too old for a base in {base}",
            code="package-too-old",
            fix="pip install -U 'bitsandbytes>=0.46'",
        )
    native: Any = bitsandbytes.cextension
    if runtime.is_available() and isinstance(native.lib, native.ErrorHandlerMockBNBNativeLibrary):
        raise MachineError(
            f"bitsandbytes {bitsandbytes.__version__} has no library for the GPUs of this machine",
            code="bitsandbytes-without-gpu-library",
            why=get_first_line(RuntimeError(native.lib.error_msg)),
            fix="`python -m bitsandbytes` tells more; install the build for torch's CUDA or ROCm",
        )


def quantise_linear_layers(model: nn.Module, names: Collection[str], base: str) -> None:
    """Replace the linear layers called `names` by layers whose weights are quantised when they are
    first read.

    Raises:
        InputError: one is no linear layer, or is used in several places.
        MachineError: bitsandbytes is missing or too old.
    """
    check_library(base)
    for name in names:
        path, _, attribute = name.rpartition(".")
        layer = model.get_submodule(name)
        model.get_submodule(path)._modules[attribute] = make_quantised_linear(layer, base, name)


def make_quantised_linear(layer: nn.Module, base: str, name: str = "") -> nn.Module:
    """Return a layer of bitsandbytes with the weight of `layer`, still to be quantised."""
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    if not is_linear(layer):
        raise InputError(
            f"module '{name}' is a {type(layer).__name__}, which cannot be quantised",
            code="layer-not-quantisable",
            fix="leave it out: linear layers are",
        )
    given: Any = layer
    weight, bias = given.weight, given.bias
    if type(layer) is not nn.Linear:  # of transformers' GPT-2, the other way round
        weight = nn.Parameter(weight.detach().T, requires_grad=False)
    outputs, inputs = weight.shape
    if base in FOUR_BIT:
        made: Any = Linear4bit(inputs, outputs, bias=False, quant_type="nf4", device="meta")
        made.weight = Params4bit(
            weight.detach(),
            requires_grad=False,
            compress_statistics=FOUR_BIT[base],
            quant_type="nf4",
            module=made,
        )
    else:
        made = Linear8bitLt(
            inputs,
            outputs,
            bias=False,
            has_fp16_weights=False,
            threshold=INT8_THRESHOLD,
            device="meta",
        )
        made.weight = Int8Params(weight.detach(), requires_grad=False)
    made.bias = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    made.source_cls = type(layer)  # as transformers marks it
    return made.train(layer.training)  # type: ignore[no-any-return]


def is_linear(module: nn.Module) -> bool:
    """Return True for a linear layer that can be quantised."""
    return type(module) is nn.Linear or _full_name(type(module)) == CONV1D


def is_transposed(module: nn.Module) -> bool:
    """Return True for a quantised layer made from one whose weight is the other way round."""
    return _full_name(getattr(module, "source_cls", nn.Linear)) == CONV1D


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


CONV1D = "transformers.pytorch_utils.Conv1D"
