"""Sources of a parameter's initial values: the model itself, its recorded initializer, or files.
Each rank requests its own intervals and gets no more than one parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpumix.engine.model.adapters import RowLengths, find_base_name, list_adapter_parameters
from gpumix.engine.model.deferred_init import get_operation_log
from gpumix.engine.model.module_buffers import persistent_buffers
from gpumix.engine.quantised.linear_layers import is_transposed
from gpumix.engine.quantised.quantised_parameter import QuantisedParameter, Tensors
from gpumix.engine.quantised.weight_formats import (
    BASES,
    describe_quantisation,
    iterate_quantised_parameters,
    to_quantised_parameter,
)
from gpumix.engine.sharding.shard import Source
from gpumix.engine.sharding.state_dict import check_names_and_shapes
from gpumix.engine.weights.file_parameter import (
    ValueSource,
    get_source,
    has_source,
    read_values,
)
from gpumix.engine.weights.quantised_source import QuantisedParameterSource
from gpumix.engine.weights.safetensors_files import SafetensorsFiles
from gpumix.engine.weights.transformers_loading import find_conversions
from gpumix.schema.errors import InputError


def make_source(model: nn.Module, weights: Path | None = None) -> Source:
    """Return the source of initial values of `model`'s parameters.

    Args:
        weights: a safetensors file or a folder of such files; None: the model's own values.
            Adapters that are not in the files begin with their own values.

    Raises:
        InputError: the files cannot be read, lack a parameter, or have it in another shape or
            quantised in another way; or, when a value is requested, the model has no value and no
            initializer.
    """
    own = _make_model_source(model)
    files = None if weights is None else _FileWeights(SafetensorsFiles(weights), model)
    floats = own if files is None else files.make_source(own)
    lengths = {id(p): _BaseWeight.of(p.layer) for p in _iterate_row_lengths(model)}

    def read_packed(name: str, parameter: QuantisedParameter, start: int, end: int) -> torch.Tensor:
        flat = None if files is None else files.read_packed(parameter)
        if flat is not None:
            return flat[start:end]
        if has_source(parameter.original):
            source = get_source(parameter.original)
            if isinstance(source, QuantisedParameterSource):
                return source.read(start, end)
        return parameter.format.read(_quantise(floats, name, parameter), start, end)

    def source(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
        if isinstance(parameter, QuantisedParameter):
            return read_packed(name, parameter, start, end)
        if isinstance(parameter, RowLengths):
            return lengths[id(parameter)].compute_row_lengths(floats, read_packed)[start:end]
        return floats(name, parameter, start, end)

    return source


def _quantise(floats: Source, name: str, parameter: QuantisedParameter) -> Tensors:
    """Return the tensors of a quantised parameter. One that is still to be quantised is, in full
    and on the host: all ranks get equal bytes."""
    tensors, form = parameter.tensors(), parameter.format
    if tensors is None:
        values = floats(name, parameter.original, 0, form.shape.numel())
        tensors = form.quantise(values.view(form.shape).cpu())
    return tensors


@dataclass(frozen=True)
class _BaseWeight:
    """Weight of a layer with adapters, as it is before the model is sharded."""

    parameter: nn.Parameter
    packed: QuantisedParameter | None

    @classmethod
    def of(cls, layer: nn.Module) -> _BaseWeight:
        parameter: Any = layer.weight
        return cls(parameter, to_quantised_parameter(parameter, layer))

    def compute_row_lengths(
        self, floats: Source, read_packed: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Return the length of each row."""
        if self.packed is None:
            shape = self.parameter.shape
            values = floats("", self.parameter, 0, shape.numel()).view(shape)
        else:
            form = self.packed.format
            flat = read_packed("", self.packed, 0, form.nbytes)
            values = form.dequantise(form.views(flat))
        return torch.linalg.norm(values.float(), dim=1)


def _iterate_row_lengths(model: nn.Module) -> Iterator[RowLengths]:
    return (p for p in model.parameters() if isinstance(p, RowLengths))


def find_unused_tensors(model: nn.Module, weights: Path) -> list[str]:
    """Return the names of tensors in `weights` that are no parameters or buffers of `model`."""
    files = SafetensorsFiles(weights)
    known = {find_base_name(n) for n, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    known |= _FileWeights(files, model).names
    return sorted(files.tensors.keys() - known)


def load_buffers(model: nn.Module, weights: Path) -> None:
    """Load `model`'s persistent buffers (running statistics, say) from `weights`; buffers not in
    there stay as is."""
    files = SafetensorsFiles(weights)
    loaded: dict[torch.Tensor, torch.Tensor] = {}  # files hold shared buffers under one name
    owned: list[tuple[nn.Module, str, torch.Tensor]] = []
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if buffer is None or key in module._non_persistent_buffers_set:
                continue
            owned.append((module, key, buffer))
            if buffer not in loaded and name in files.tensors:
                loaded[buffer] = files.tensors[name].read_all().to(buffer.dtype)
    for module, key, buffer in owned:
        module._buffers[key] = loaded.get(buffer, buffer)


def _make_model_source(model: nn.Module) -> Source:
    log = get_operation_log(model)

    def source(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
        if not parameter.is_meta:
            return parameter.detach().reshape(-1)[start:end]
        if has_source(parameter):
            return read_values(name, parameter, start, end)
        if log is None:
            raise make_valueless_error(f"parameter '{name}'")
        # A transformer's parameters are made one at a time, in full: the largest is an embedding.
        return log.materialize(parameter).reshape(-1)[start:end]

    return source


def check_has_values(model: nn.Module) -> None:
    """Check that all parameters and buffers have values, or are known to be in files.

    Raises:
        InputError: one is on the meta device, and nothing says what its values are.
    """
    log = get_operation_log(model)
    for name, parameter in model.named_parameters():
        known = has_source(parameter) or isinstance(parameter, RowLengths)
        if parameter.is_meta and not known and (log is None or not log.knows(parameter)):
            raise make_valueless_error(f"parameter '{name}'")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise make_valueless_error(f"buffer '{name}'")


def make_valueless_error(what: str) -> InputError:
    """Return the error for a parameter or buffer without values."""
    return InputError(
        f"{what} is on the meta device and nothing says what its values are",
        code="meta-without-values",
        fix="load the model with gpumix.from_pretrained(folder), or by `from_pretrained` inside "
        "`with gpumix.lazy_weights():`; for a model that begins without weights, "
        "gpumix.build(function, seed); before PEFT adds prompts, or adapters that begin where the "
        "model's weights are, by `from_pretrained` of transformers",
    )


class _FileWeights:
    """Weights of a model in safetensors files, under the names that the model's parameters have, or
    had before adapters were added.

    Raises:
        InputError: the files lack a parameter, or have it in another shape or quantised in another
            way.
    """

    def __init__(self, files: SafetensorsFiles, model: nn.Module) -> None:
        self._files = files
        self._packed = {id(one.original): one for _, one in iterate_quantised_parameters(model)}
        # A file holds tied parameters once, under any of their names.
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).extend((name, find_base_name(name)))
        shapes = files.shapes
        self._found = {p: next((n for n in own if n in shapes), own[1]) for p, own in names.items()}
        self._converted = self._find_converted(model, names)
        added = list_adapter_parameters(model)
        self._added = {
            id(parameter)
            for name, parameter in model.named_parameters()
            if name in added and self._found[id(parameter)] not in shapes
        }
        read = [p for p in model.parameters() if id(p) not in self._added]
        for parameter in read:
            self._check_quantisation(parameter)
        wanted = {self._found[id(p)]: self._shape(p) for p in read if not self._is_packed(p)}
        wanted |= {n: b.shape for n, b in persistent_buffers(model).items() if n in shapes}
        there = {name: shapes[name] for name in wanted if name in shapes}
        there |= {self._found[p]: list(source.shape) for p, source in self._converted.items()}
        check_names_and_shapes(
            wanted,
            there,
            "the weights are those of another model",
            code="weights-of-another-model",
            where=str(files.path),
            fix="take the model's configuration next to the weights (config.json), or leave "
            "the weights out to begin anew",
        )

    def _find_converted(
        self, model: nn.Module, names: Mapping[int, Sequence[str]]
    ) -> dict[int, ValueSource]:
        """Return the sources of parameters that files have under other names, or in other pieces,
        by identity."""
        missing = [p for p, name in self._found.items() if name not in self._files.shapes]
        known = find_conversions(model, self._files) if missing else {}
        found: dict[int, ValueSource] = {}
        for parameter in missing:
            name = next((name for name in names[parameter] if name in known), None)
            if name is not None:
                found[parameter] = known[name]
        return found

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of a parameter in the files."""
        return parameter.shape[::-1] if self._is_transposed(parameter) else parameter.shape

    def _is_transposed(self, parameter: nn.Parameter) -> bool:
        packed = self._packed.get(id(parameter))
        return packed is not None and is_transposed(packed.owner)

    def _is_packed(self, parameter: nn.Parameter) -> bool:
        """Return True if the files have a quantised parameter in the model's format."""
        packed = self._packed.get(id(parameter))
        if packed is None:
            return False
        names = packed.format.entry_names(self._found[id(parameter)])
        return all(name in self._files.shapes for name in names.values())

    def _check_quantisation(self, parameter: nn.Parameter) -> None:
        """Refuse quantised weights for a parameter that is not quantised in that way."""
        name = self._found[id(parameter)]
        told = describe_quantisation(name, self._files.shapes)
        packed = self._packed.get(id(parameter))
        if not told or (packed is not None and told == packed.format.kind):
            return
        has = "not quantised" if packed is None else f"quantised as {packed.format.kind}"
        raise InputError(
            f"the weights are quantised as {told}, and in the model '{name}' is {has}",
            code="quantised-format-mismatch",
            where=str(self._files.path),
            fix=f"set `model.base` to {told}, with `model.lora`, or give weights in 16 bits"
            if told in BASES
            else "give weights in 16 bits: `model.base` quantises them",
        )

    def read_packed(self, parameter: QuantisedParameter) -> torch.Tensor | None:
        """Return the bytes of a quantised parameter; None if the files have it unquantised."""
        if not self._is_packed(parameter.original):
            return None
        form, name = parameter.format, self._found[id(parameter.original)]
        names = form.entry_names(name).values()
        return form.pack_entries(name, {n: self._files.tensors[n].read_all() for n in names})

    def make_source(self, own: Source) -> Source:
        """Return the source of floating-point values; `own` has those of added adapters."""

        def source(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
            if id(parameter) in self._added:
                return own(name, parameter, start, end)
            tensor = self._converted.get(id(parameter))
            tensor = tensor or self._files.tensors[self._found[id(parameter)]]
            if self._is_transposed(parameter):
                return tensor.read_all().T.reshape(-1)[start:end]
            return tensor.read(start, end)

        return source

    @property
    def names(self) -> set[str]:
        """Names of the tensors that the model takes."""
        taken = set(self._found.values())
        taken |= {name for source in self._converted.values() for name in source.names}
        for packed in self._packed.values():
            taken |= set(packed.format.entry_names(self._found[id(packed.original)]).values())
        return taken
