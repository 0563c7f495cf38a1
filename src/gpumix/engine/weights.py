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
    return _own_values(model) if weights is None else _from_files(_Files(weights), model)


def load_buffers(model: nn.Module, weights: Path) -> None:
    """Give `model`'s persistent buffers (running statistics, say) their values in `weights`; those
    that are not in there stay."""
    files = _Files(weights)
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            transient = key in module._non_persistent_buffers_set
            if buffer is not None and not transient and name in files.holding:
                with files.opened(name, buffer.shape) as tensor:
                    module._buffers[key] = tensor[...].to(buffer.dtype)


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


def _from_files(files: _Files, model: nn.Module) -> Source:
    # Of tied parameters a file holds one, by any of their names.
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)

    def source(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
        found = [n for n in names[id(parameter)] if n in files.holding]
        if not found:
            raise InputError(
                f"there is no tensor '{name}' for the model's parameter of that name",
                where=str(files.path),
                why=f"the file holds {', '.join(sorted(files.holding)[:4])}, ... "
                f"({len(files.holding)} tensors)",
            )
        with files.opened(found[0], parameter.shape) as tensor:
            return _interval(tensor, parameter.shape, start, end)

    return source


class _Files:
    """A safetensors file, or all of a folder; `holding` tells which file holds which tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise InputError("found no .safetensors file", where=str(path))
        self.holding: dict[str, Path] = {}
        for file in files:
            with _opened(file) as opened:
                self.holding.update(dict.fromkeys(opened.keys(), file))

    @contextlib.contextmanager
    def opened(self, name: str, shape: torch.Size) -> Iterator[Any]:
        """Tensor `name`, still on the disk."""
        file = self.holding[name]
        with _opened(file) as opened:
            tensor = opened.get_slice(name)
            if list(tensor.get_shape()) != list(shape):
                raise InputError(
                    f"tensor '{name}' has shape {tuple(tensor.get_shape())}, the model wants "
                    f"{tuple(shape)}",
                    where=str(file),
                )
            yield tensor


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
