"""Where a parameter's initial values come from: the model itself, its recorded initialiser, or
safetensors. Each rank asks for the intervals that it owns and gets no more than one parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from gpumix.engine.deferred import log_of
from gpumix.engine.shards import Source
from gpumix.spec.errors import InputError


def source_of(model: nn.Module, weights: Path | None = None) -> Source:
    """What gives the initial values of `model`'s parameters.

    Args:
        weights: a safetensors file or a folder of them; None takes the model's own values.

    Raises:
        InputError: now, or when a value is asked for: it has no values and no initialiser.
    """
    own = _own_values(model)
    return _from_files(weights, own) if weights else own


def _own_values(model: nn.Module) -> Source:
    log = log_of(model)

    def source(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
        if not parameter.is_meta:
            return parameter.detach().reshape(-1)[start:end]
        if log is None:
            raise InputError(
                f"parameter '{name}' is on the meta device and nothing says what its values are",
                fix="build the model with gpumix.build(function, seed), or give `weights`",
            )
        # A transformer's parameters are made one at a time and whole: the largest is an embedding.
        return log.materialize(parameter).reshape(-1)[start:end]

    return source


def _from_files(path: Path, own: Source) -> Source:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError("found no .safetensors file", where=str(path))
    where: dict[str, Path] = {}
    for file in files:
        with _opened(file) as opened:
            where.update(dict.fromkeys(opened.keys(), file))

    def source(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
        if name not in where:
            raise InputError(
                f"there is no tensor '{name}' for the model's parameter of that name",
                where=str(path),
                why=f"the file holds {', '.join(sorted(where)[:4])}, ... ({len(where)} tensors)",
            )
        with _opened(where[name]) as opened:
            tensor = opened.get_slice(name)
            if list(tensor.get_shape()) != list(parameter.shape):
                raise InputError(
                    f"tensor '{name}' has shape {tuple(tensor.get_shape())}, the model wants "
                    f"{tuple(parameter.shape)}",
                    where=str(where[name]),
                )
            return _interval(tensor, parameter.shape, start, end)

    return source


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise InputError("cannot read the weights", where=str(file), why=str(error)) from error


def _interval(tensor: Any, shape: torch.Size, start: int, end: int) -> torch.Tensor:
    """Elements [start, end) of a tensor on disk, flattened; reads only the rows they are in."""
    if not shape:
        return tensor[...].reshape(-1)[start:end]
    row = max(1, shape[1:].numel())
    first, last = start // row, -(-end // row)
    return tensor[first:last].reshape(-1)[start - first * row : end - first * row]
