"""Values for modules that compute before the model is sharded, read from files in full."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gpumix.engine.quantised.quantised_parameter import ModuleParameter
from gpumix.engine.weights.file_parameter import get_source, has_source, read_values
from gpumix.engine.weights.quantised_source import QuantisedParameterSource
from gpumix.schema.errors import InputError


def read_all_values(model: nn.Module, chosen: Collection[nn.Parameter] | None = None) -> nn.Module:
    """Give a model all of its values in this process, as if it had been loaded without gpumix.

    Args:
        chosen: the parameters that get values; default: all.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or not has_source(parameter):
                continue
            if chosen is not None and parameter not in chosen:
                continue
            if parameter not in made:
                name = f"{prefix}.{attribute}" if prefix else attribute
                installed = _make_parameter(name, parameter, module)
                made[parameter] = installed.parameter
                for one in installed.attributes:
                    one.holder[one.key] = one.value
            module._parameters[attribute] = made[parameter]
    return model


def check_has_been_read(model: nn.Module) -> None:
    """Check that a model can be called.

    Raises:
        InputError: its weights are still in files.
    """
    if any(map(has_source, model.parameters())):
        raise InputError(
            "the model is called before it is prepared for training, and its weights are still in "
            "files",
            code="model-called-before-prepare",
            fix="prepare its optimizer and the loader of its training data first; or load it "
            "without gpumix.lazy_weights",
        )


@contextmanager
def with_values(layer: nn.Module) -> Iterator[None]:
    """Give a layer the values of its own parameters inside the context. Parameters that are changed
    there stay, with their values."""
    held = {key: p for key, p in layer._parameters.items() if p is not None and has_source(p)}
    # Nobody changes quantised ones.
    packed = [key for key, p in held.items() if isinstance(get_source(p), QuantisedParameterSource)]
    made = {key: _make_parameter(key, parameter, layer) for key, parameter in held.items()}
    attributes = [one for installed in made.values() for one in installed.attributes]
    before = [(one.holder, one.key, one.holder.get(one.key)) for one in attributes]
    layer._parameters.update({key: installed.parameter for key, installed in made.items()})
    for one in attributes:
        one.holder[one.key] = one.value
    try:
        yield
    finally:
        for key, parameter in held.items():
            now = layer._parameters.get(key)
            if key in packed or (now is made[key].parameter and _is_read_from(parameter, now)):
                parameter.requires_grad_(made[key].parameter.requires_grad)
                layer._parameters[key] = parameter
        for holder, key, value in before:
            holder[key] = value


def _is_read_from(parameter: nn.Parameter, now: nn.Parameter) -> bool:
    """Return True if `now` has the values that `parameter` has in files."""
    if now.shape != parameter.shape or now.dtype != parameter.dtype:
        return False
    return torch.equal(read_values("", parameter, 0, now.numel()), now.detach().reshape(-1))


@torch.no_grad()
def _make_parameter(name: str, parameter: nn.Parameter, owner: nn.Module) -> ModuleParameter:
    """Return a parameter with values, quantised if it is to be."""
    source = get_source(parameter)
    if isinstance(source, QuantisedParameterSource):
        made = source.format.restore(source.read_tensors())
        return ModuleParameter(made, source.format.attributes(made, owner))
    values = read_values(name, parameter, 0, parameter.numel()).view(parameter.shape)
    # a copy: files must not stay mapped
    return ModuleParameter(nn.Parameter(values.clone(), requires_grad=parameter.requires_grad))
