"""Recorded loading of transformers: the tensors of files behind each parameter, and their
conversion.

The loading code of transformers itself runs, on tensors without values: it renames, merges, splits
and casts what newer models have in another form than files. What it did for a parameter is done
again, with values, when a rank reads the parameter.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gpumix.engine.quantised.linear_layers import is_transposed
from gpumix.engine.quantised.weight_formats import find_format
from gpumix.engine.weights.file_parameter import FileParameter, ValueSource
from gpumix.engine.weights.quantised_file_parameter import make_quantised_parameter
from gpumix.engine.weights.quantised_source import (
    QuantisedParameterSource,
    QuantisedSource,
    UnquantisedSource,
)
from gpumix.engine.weights.safetensors_files import FileTensor, SafetensorsFiles
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.schema.errors import InputError

EXTRA_STATE = "_extra_state"  # of a module's name


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a file, for code that reads it as safetensors' slices."""

    stored: FileTensor

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.stored.read_all()[key]

    def get_shape(self) -> list[int]:
        return list(self.stored.shape)

    def get_dtype(self) -> str:
        """Return the dtype's name as safetensors has it, which begins with F or BF for floats."""
        return "F" if self.stored.dtype.is_floating_point else "I"


@dataclass(frozen=True)
class _Collected:
    """A tensor collected for a conversion by transformers; a call returns it without values."""

    stored: FileTensor

    def __call__(self) -> torch.Tensor:
        return torch.empty(self.stored.shape, dtype=self.stored.dtype, device="meta")


class _Shapes:
    """Stand-in for a model in conversions, which look at shapes."""

    def __init__(self, model: nn.Module) -> None:
        self._of = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._of[name]

    get_parameter_or_buffer = get_parameter


@dataclass(frozen=True)
class _Conversion:
    """A conversion of tensors of files into parameters, to be done again with values.

    Attributes:
        mapping: of transformers, `convert` its own method.
        collected: the tensors, by pattern of their names.
        given: further arguments of `convert`.
    """

    mapping: Any
    convert: Callable[..., Mapping[str, Any]]
    layer: str
    collected: Mapping[str, Sequence[_Collected]]
    given: Mapping[str, Any]

    @torch.no_grad()
    def run(self) -> Mapping[str, Any]:
        """Return the parameters, by name."""
        _collect(self.mapping, self.collected)
        return self.convert(self.mapping, self.layer, **self.given)


@dataclass(frozen=True)
class _Converted:
    """A parameter that a conversion makes. A part of it is read by making all of it."""

    conversion: _Conversion
    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        collected = self.conversion.collected.values()
        return tuple(one.stored.name for tensors in collected for one in tensors)

    def read(self, start: int, end: int) -> torch.Tensor:
        return self.read_all().reshape(-1)[start:end]

    def read_all(self) -> torch.Tensor:
        return _only(self.conversion.run()[self.name])


@dataclass(frozen=True)
class _Transposed:
    """A matrix stored in the files as its transpose."""

    source: ValueSource

    @property
    def shape(self) -> torch.Size:
        return self.source.shape[::-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return self.source.names

    def read(self, start: int, end: int) -> torch.Tensor:
        return self.read_all().reshape(-1)[start:end]

    def read_all(self) -> torch.Tensor:
        return self.source.read_all().T


def find_conversions(model: nn.Module, files: SafetensorsFiles) -> Mapping[str, ValueSource]:
    """Return the sources of the parameters that transformers would load from files, by name; none
    for models of others."""
    if "transformers" not in sys.modules:
        return {}
    from transformers import PreTrainedModel, modeling_utils
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not isinstance(model, PreTrainedModel) or not hasattr(modeling_utils, "LoadStateDictConfig"):
        return {}
    with torch.device("meta"):
        like: Any = type(model)(copy.deepcopy(model.config))
    mapping: Any = get_model_conversion_mapping(like)
    recorder = LoadingRecorder(like)
    recorder.load(files, modeling_utils.LoadStateDictConfig(weight_mapping=mapping))
    return recorder.sources


class LoadingRecorder:
    """Records how transformers fills the parameters of a model that it loads.

    Buffers, and what cannot be converted without values, get their values at once.

    Args:
        model: on the meta device.

    Attributes:
        sources: of the parameters, by name.
    """

    def __init__(self, model: Any) -> None:
        self.sources: dict[str, ValueSource] = {}
        self._model = model
        self._shapes = _Shapes(model)
        self._buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}

    def load(self, files: SafetensorsFiles, config: Any) -> Any:
        """Let transformers load the model from files, as its loading `config` says.

        Returns:
            What transformers tells of missing, unexpected and mismatched tensors.
        """
        from transformers import core_model_loading as core

        with ExitStack() as stack:
            # No bar of progress: nothing is read yet.
            stack.enter_context(
                replace_attributes(core, spawn_materialize=_spawn, tqdm=_without_bar)
            )
            for kind in (core.WeightRenaming, core.WeightConverter):
                convert = partial(self._convert, kind.convert)
                stack.enter_context(replace_attributes(kind, convert=_as_method(convert)))
            found, _ = core.convert_and_load_state_dict_in_model(
                model=self._model,
                state_dict={n: LazyTensor(tensor) for n, tensor in files.tensors.items()},
                load_config=config,
            )
        return found

    def _convert(
        self,
        convert: Callable[..., Mapping[str, Any]],
        mapping: Any,
        layer: str,
        **given: Any,
    ) -> Mapping[str, Any]:
        """Convert without values, and return parameters to be read later."""
        collected = {key: list(tensors) for key, tensors in mapping.collected_tensors.items()}
        if not all(isinstance(one, _Collected) for ones in collected.values() for one in ones):
            return convert(mapping, layer, **given)  # tensors that the program gave
        quantises, mapping.quantization_operation = mapping.quantization_operation, None
        now = partial(self._convert_now, convert, mapping, layer, collected, given)
        if _takes_quantised(mapping) and sum(map(len, collected.values())) > 1:
            return self._place_packed(now(), collected)
        try:
            converted = convert(mapping, layer, **given)
        except _skip_error():
            given["loading_info"].conversion_errors.pop(layer, None)
            mapping.quantization_operation = quantises
            return now()
        later = {"model": self._shapes, "config": given.get("config")}
        conversion = _Conversion(mapping, convert, layer, collected, later)
        return {
            name: self._place(name, _find_source(conversion, name, _only(value)), quantises)
            for name, value in converted.items()
        }

    @staticmethod
    def _convert_now(
        convert: Callable[..., Mapping[str, Any]],
        mapping: Any,
        layer: str,
        collected: Mapping[str, Sequence[_Collected]],
        given: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        _collect(mapping, collected)
        return convert(mapping, layer, **given)

    def _place_packed(
        self, converted: Mapping[str, Any], collected: Mapping[str, Sequence[_Collected]]
    ) -> Mapping[str, Any]:
        """Return weights quantised in the files, without values."""
        found: dict[str, Any] = {}
        for name, values in converted.items():
            value: Any = _only(values)
            found[name] = value
            form = find_format(value) if isinstance(value, nn.Parameter) else None
            if form is None:
                continue
            path, _, attribute = name.rpartition(".")
            owner = self._model.get_submodule(path)
            suffixes = {s: s[1:] if s.startswith("/") else attribute + s for s in form.suffixes}
            entries = {s: collected[k][0].stored for s, k in suffixes.items() if k in collected}
            found[name] = _install_quantised(owner, QuantisedSource(form, entries))
        return found

    def _place(self, name: str, source: ValueSource, quantises: object) -> torch.Tensor:
        """Return what becomes the parameter or buffer `name`."""
        if name in self._buffers or name.endswith(EXTRA_STATE):
            return source.read_all()
        self.sources[name] = source
        if quantises is None:
            grows = source.dtype.is_floating_point
            return FileParameter.of(source, requires_grad=grows)
        path, _, attribute = name.rpartition(".")
        owner = self._model.get_submodule(path)
        held: nn.Parameter = owner._parameters[attribute]
        if is_transposed(owner):
            source = _Transposed(source)
        if source.shape != held.shape:
            raise InputError(
                f"'{name}' has shape {tuple(source.shape)} in the weights, and "
                f"{tuple(held.shape)} in the model",
                code="weight-shape-mismatch",
                fix="take the configuration next to the weights (config.json)",
            )
        held.requires_grad_(False)
        form = find_format(held)
        if form is None:
            raise _make_unknown_quantisation_error(name, quantises)
        owner._is_hf_initialized = True
        return _install_quantised(owner, UnquantisedSource(form, source, held.dtype))


def _make_unknown_quantisation_error(name: str, quantises: Any) -> InputError:
    config = getattr(getattr(quantises, "hf_quantizer", None), "quantization_config", None)
    method = getattr(config, "quant_method", type(quantises).__name__)
    return InputError(
        f"'{name}' is to be quantised by {getattr(method, 'value', method)}, while its values stay "
        "in files",
        code="quantising-while-in-files",
        why="each rank quantises what it reads, which is known of bitsandbytes alone",
        fix="load the model with `from_pretrained` of transformers, without gpumix.lazy_weights; "
        "or with BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')",
    )


def _install_quantised(owner: Any, source: QuantisedParameterSource) -> nn.Parameter:
    """Return the parameter of a quantised weight, after its module got what belongs to it."""
    made: Any = make_quantised_parameter(source)
    if "quant_state" in vars(owner):
        owner.quant_state = made.quant_state
    return made  # type: ignore[no-any-return]


def _find_source(conversion: _Conversion, name: str, value: torch.Tensor) -> ValueSource:
    """Return the source of a parameter: a tensor of a file, if it only got another name."""
    from transformers.core_model_loading import WeightRenaming

    mapping, collected = conversion.mapping, conversion.collected
    if isinstance(mapping, WeightRenaming):
        return collected[mapping.source_patterns[0]][0].stored
    if _takes_quantised(mapping):  # and this one is not quantised
        return next(iter(collected.values()))[0].stored
    return _Converted(conversion, name, value.shape, value.dtype)


def _takes_quantised(mapping: Any) -> bool:
    """Return True for a conversion of weights that files have quantised."""
    return any(getattr(one, "hf_quantizer", None) for one in getattr(mapping, "operations", ()))


def _collect(mapping: Any, collected: Mapping[str, Sequence[_Collected]]) -> None:
    """Give a conversion the collected tensors, to be read with values."""
    found: dict[str, list[Any]] = defaultdict(list)
    found |= {key: [one.stored.read_all for one in ones] for key, ones in collected.items()}
    mapping.collected_tensors = found


def _spawn(
    pool: object,
    tensor: Any,
    device: object = None,
    dtype: torch.dtype | None = None,
    **_: object,
) -> Any:
    """Collect a tensor for a conversion, as transformers' function of the name does."""
    if isinstance(tensor, LazyTensor):
        return _Collected(tensor.stored.cast(dtype))
    return lambda: tensor[...].to(device=device, dtype=dtype)


def _without_bar(items: Iterable[Any], **_: object) -> Iterable[Any]:
    return items


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    def convert(mapping: Any, layer_name: str, **given: Any) -> Any:
        return function(mapping, layer_name, **given)

    return convert


def _skip_error() -> type[Exception]:
    from transformers.core_model_loading import SkipParameters

    found: type[Exception] = SkipParameters
    return found


def _only(value: Any) -> torch.Tensor:
    found: torch.Tensor = value[0] if isinstance(value, list) else value
    return found
