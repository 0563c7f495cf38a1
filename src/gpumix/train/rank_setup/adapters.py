"""LoRA adapters of jobs, through PEFT, on a base in 16 bits or quantised."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from gpumix.engine.model.adapters import RowLengths
from gpumix.engine.quantised.linear_layers import is_linear, quantise_linear_layers
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.schema.errors import InputError, MachineError, get_first_line
from gpumix.schema.job.job import ModelSpec

FLAGS = {"nf4": "is_loaded_in_4bit", "nf4-double": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}
"""Attributes of a quantised model that PEFT goes by."""


def add_adapters(model: nn.Module, spec: ModelSpec) -> nn.Module:
    """Freeze a model, quantise the matrices of its blocks where the job says so, and add adapters.

    Raises:
        InputError: `targets` name no linear layer, or the blocks have none.
        MachineError: PEFT or bitsandbytes is missing.
    """
    assert spec.lora is not None
    layers = list_linear_layers(model, spec)
    if spec.base is not None:
        quantise_linear_layers(model, layers, spec.base)
        setattr(model, FLAGS[spec.base], True)
    peft = _import_peft()
    config = peft.LoraConfig(
        r=spec.lora.rank,
        lora_alpha=2 * spec.lora.rank if spec.lora.alpha is None else spec.lora.alpha,
        lora_dropout=spec.lora.dropout,
        target_modules=list(spec.lora.targets) or layers,
        use_dora=spec.lora.dora,
    )
    try:
        with _lengths_of_rows_later():
            adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        ends = {name.rpartition(".")[2] for name in layers}
        raise InputError(
            "PEFT cannot add these adapters",
            code="adapters-invalid",
            where="model.lora",
            why=get_first_line(error),
            fix=f"linear layers of the blocks end in {', '.join(sorted(ends))}",
        ) from error
    return adapted


def list_linear_layers(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Return the names of the linear layers inside of the blocks.

    Raises:
        InputError: there are none.
    """
    found = [
        f"{unit.name}.{name}" if unit.name else name
        for unit in split_into_units(model, spec.units).units
        for name, module in unit.module.named_modules()
        if name and is_linear(module)
    ]
    if not found:
        raise InputError(
            "the model's blocks have no linear layers, which adapters are for",
            code="no-layers-for-adapters",
            where="model.lora",
            fix="leave out `model.lora`, or name other blocks with `model.units`",
        )
    return found


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MachineError(
            "`model.lora` needs the package peft",
            code="package-missing",
            why=get_first_line(error),
            fix="pip install peft, or leave out `model.lora`",
        ) from error
    return peft


def _lengths_of_rows_later() -> AbstractContextManager[None]:
    """Let DoRA's layers be made without the weights whose rows' lengths they begin with: these are
    computed when initial values are read."""
    from peft.tuners.lora.dora import DoraLinearLayer

    def make(self: Any, *, base_layer: Any, lora_A: Any, lora_B: Any, **_: Any) -> None:
        rows = torch.empty(lora_B.shape[0], device="meta", dtype=lora_B.dtype)
        self.weight = RowLengths.of(base_layer, rows)

    return replace_attributes(DoraLinearLayer, update_layer=make)
