"""Formats of quantised weights, found by the classes of parameters; no library is imported."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gpumix.engine.quantised.quantised_parameter import QuantisedParameter, WeightFormat
from gpumix.schema.plan.stage import ComputeDtype

BASES = ("nf4", "nf4-double", "int8")  # of jobs
# Names beside a quantised weight in files, and the library that wrote them.
FOREIGN = {
    "qweight": "GPTQ or AWQ",
    "weight_scale_inv": "fp8",
    "weight_scale": "fp8 or compressed tensors",
    "weight_packed": "compressed tensors",
    "W_q": "HQQ",
}


def to_quantised_parameter(parameter: nn.Parameter, module: nn.Module) -> QuantisedParameter | None:
    """Return a module's parameter as bytes; None for a parameter that is not quantised.

    Raises:
        InputError: the weight is quantised in a way that cannot be divided.
    """
    form = find_format(parameter)
    return None if form is None else QuantisedParameter.of(parameter, module, form)


def find_format(parameter: nn.Parameter) -> WeightFormat | None:
    """Return the format of a parameter; None if it is not quantised."""
    given: Any = parameter
    kind = type(parameter)
    if kind.__module__.startswith("bitsandbytes."):
        from gpumix.engine.quantised.bitsandbytes_weights import FourBitFormat, Int8Format

        return FourBitFormat.of(given) if kind.__name__ == "Params4bit" else Int8Format.of(given)
    if kind.__module__.startswith("torchao.") and hasattr(given, "__tensor_flatten__"):
        from gpumix.engine.quantised.torchao_weights import TorchaoFormat

        return TorchaoFormat.of(given)
    return None


def iterate_quantised_parameters(model: nn.Module) -> Iterator[tuple[str, QuantisedParameter]]:
    """Yield the quantised parameters of a model as bytes, by name."""
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            packed = None if parameter is None else to_quantised_parameter(parameter, module)
            if packed is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, packed


def casts_its_bias(module: nn.Module) -> bool:
    """Return True for a module that gives its bias other memory where dtypes differ."""
    return type(module).__module__.startswith("bitsandbytes.")


def find_layer_dtypes(model: nn.Module) -> set[ComputeDtype]:
    """Return the dtypes in which layers of bitsandbytes compute by their own settings, whatever the
    plan's dtype. Activations in 8 bits are as coarse as bf16; and which of their columns are
    outliers, and so in 16 bits, depends on all samples of a product."""
    found: set[ComputeDtype] = set()
    for module in model.modules():
        if type(module).__module__.startswith("bitsandbytes."):
            if type(module).__name__ == "Linear8bitLt":
                found.add("bf16")
            else:
                found |= _OWN_DTYPES.get(getattr(module, "compute_dtype", None), set())
    return found


_OWN_DTYPES: Mapping[object, set[ComputeDtype]] = {
    torch.bfloat16: {"bf16"},
    torch.float16: {"fp16"},
}


def describe_quantisation(name: str, names: Collection[str]) -> str:
    """Return how a parameter is quantised among the `names` of a file's tensors; empty if it is
    not."""
    prefix = name.rpartition(".")[0]
    nested = "-double" if f"{name}.nested_absmax" in names else ""
    for quant_type in ("nf4", "fp4"):
        if f"{name}.quant_state.bitsandbytes__{quant_type}" in names:
            return quant_type + nested
    if f"{prefix}.SCB" in names:
        return "int8"
    return next((told for key, told in FOREIGN.items() if f"{prefix}.{key}" in names), "")
