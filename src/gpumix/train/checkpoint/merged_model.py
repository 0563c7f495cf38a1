"""The model of a checkpoint that holds adapters: its base, read again, with the adapters merged.

The base is opened as the run did, by the job in the checkpoint: without weights at first. Then each
weight is read by itself, as the run trained on it (quantised and back, if the job says so), and the
product of its adapter's matrices is added. So no more than the tensors of one file are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from gpumix.engine.model.adapters import (
    find_base_name,
    iterate_adapter_layers,
    list_adapter_parameters,
)
from gpumix.engine.model.frozen_base import DigestingSource, FrozenBase, format_sum
from gpumix.engine.quantised.linear_layers import is_transposed
from gpumix.engine.quantised.quantised_parameter import QuantisedParameter
from gpumix.engine.sharding.initial_weights import make_source
from gpumix.engine.sharding.unit_discovery import ParameterSlot, split_into_units
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import ModelSpec
from gpumix.schema.reading.allowed_code import check_factory
from gpumix.train.checkpoint.manifest import Manifest, SavedBase

ReadTensors = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Reads tensors of the checkpoint's model, by name, in fp32."""
ADAPTER = "default"  # PEFT's name
ADAPTERS_FILE, PEFT_PREFIX = "adapter_model.safetensors", "base_model.model."
TASK_TYPES = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM"}  # of PEFT


class MergedModel:
    """The full model of a checkpoint of adapters.

    Args:
        manifest: of the checkpoint, with the job that saved it.
        read: reads the adapters.
        folder: where a factory's module is looked for.
        allowed: code that the job may call.

    Raises:
        InputError: no job saved the checkpoint, its base cannot be read, or a factory is not
            allowed.
    """

    def __init__(
        self, manifest: Manifest, read: ReadTensors, *, folder: Path, allowed: Sequence[str]
    ) -> None:
        from gpumix.train.rank_setup.model import build_model  # imports transformers

        assert manifest.base is not None, "the checkpoint holds all"
        self._saved, self._read_adapters = manifest.base, read
        self.spec = _read_spec(manifest)
        if self.spec.factory is not None:
            check_factory("model.factory", self.spec.factory, allowed)
        self.model = build_model(self.spec, folder=folder, seed=_read_seed(manifest))
        self._source = DigestingSource(make_source(self.model, self.spec.weights))
        self.added = sorted(list_adapter_parameters(self.model))
        units = split_into_units(self.model, self.spec.units)
        self._slots = [slot for unit in units.all for slot in unit.slots]
        self._of_base = {
            find_base_name(slot.name): slot
            for slot in self._slots
            if slot.name not in {*self.added}
        }
        self._layers: dict[str, nn.Module] = dict(iterate_adapter_layers(self.model))

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the base's parameters, by name, in the order of the model."""
        return {name: self._shape(slot) for name, slot in self._of_base.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter before it is exported."""
        parameter = self._of_base[name].parameter
        return torch.float32 if isinstance(parameter, QuantisedParameter) else parameter.dtype

    @staticmethod
    def _shape(slot: ParameterSlot) -> torch.Size:
        parameter = slot.parameter
        if not isinstance(parameter, QuantisedParameter):
            return parameter.shape
        shape = parameter.format.shape
        return shape[::-1] if is_transposed(parameter.owner) else shape

    @torch.no_grad()
    def read(self, name: str) -> torch.Tensor:
        """Return a parameter of the base, with its adapter merged."""
        slot = self._of_base[name]
        values = self._read_base(slot)
        layer = self._layers.get(slot.name.removesuffix(".base_layer.weight"))
        if layer is not None and slot.name.endswith(".base_layer.weight"):
            values = self._merge(slot.name.removesuffix(".base_layer.weight"), layer, values)
        transposed = isinstance(slot.parameter, QuantisedParameter) and is_transposed(
            slot.parameter.owner
        )
        return values.T.contiguous() if transposed else values

    def _read_base(self, slot: ParameterSlot) -> torch.Tensor:
        parameter = slot.parameter
        flat = self._source(slot.name, parameter, 0, parameter.numel())
        if isinstance(parameter, QuantisedParameter):
            return parameter.format.dequantise(parameter.format.views(flat)).float()
        return flat.view(parameter.shape)

    def _merge(self, prefix: str, layer: Any, base: torch.Tensor) -> torch.Tensor:
        """Return a weight with the product of an adapter's matrices, as PEFT merges it."""
        own = [f"{prefix}.lora_{part}.{ADAPTER}.weight" for part in "AB"]
        length = f"{prefix}.lora_magnitude_vector.{ADAPTER}.weight"
        found = self._read_adapters([*own, *([length] if length in self.added else [])])
        down, up = (found[name] for name in own)
        product = layer.scaling[ADAPTER] * (up @ down)
        if getattr(layer, "fan_in_fan_out", False):
            product = product.T
        merged = base.float() + product
        if length in found:
            merged *= (found[length] / torch.linalg.norm(merged, dim=1))[:, None]
        return merged

    def save_adapters(self, folder: Path) -> None:
        """Write the adapters alone, as PEFT saves them."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        config: Any = self.model.peft_config[ADAPTER]  # type: ignore[index,union-attr]
        config.base_model_name_or_path = self._saved.name
        config.task_type = TASK_TYPES.get(self.spec.task)
        config.inference_mode = True
        config.save_pretrained(str(folder))
        state = get_peft_model_state_dict(
            self.model,
            state_dict=dict(self._read_adapters(self.added)),
            save_embedding_layers=False,
        )
        named = {f"{PEFT_PREFIX}{name}": value.contiguous() for name, value in state.items()}
        save_file(named, folder / ADAPTERS_FILE, metadata={"format": "pt"})

    def check_base(self, where: Path) -> None:
        """Check that all that was read is the base of the adapters.

        Raises:
            InputError: it is another one.
        """
        saved = FrozenBase(self._saved.name, self._saved.checksum)
        slots = self._of_base.values()
        total = self._source.make_own_sum((s.name, 0, s.parameter.numel()) for s in slots)
        read = FrozenBase(str(self.spec.weights or ""), format_sum(total))
        read.check_same(saved, str(where))


def refuse_without_job(base: SavedBase) -> InputError:
    return InputError(
        "the checkpoint holds adapters, and does not say how its base is made",
        code="adapters-without-base",
        why=f"no job saved it; its base is {base.name or 'a model'}",
        fix="merge them with PEFT: PeftModel.from_pretrained(base, folder).merge_and_unload(), of "
        "the folder with adapter_model.safetensors",
    )


def _read_spec(manifest: Manifest) -> ModelSpec:
    job: Any = manifest.extra.get("job")
    told: Any = job.get("model") if isinstance(job, dict) else None
    assert manifest.base is not None
    if not isinstance(told, dict):
        raise refuse_without_job(manifest.base)
    config: Any = manifest.extra.get("model_config")
    if told.get("config") is not None and isinstance(config, dict):  # its file may be gone
        told = told | {"config": config}
    try:
        return ModelSpec.model_validate(told)
    except ValidationError as error:
        raise refuse_without_job(manifest.base) from error


def _read_seed(manifest: Manifest) -> int:
    job: Any = manifest.extra["job"]
    seed = job.get("seed")
    return seed if type(seed) is int else 0
