"""Sources of a parameter's initial values: the model itself, its recorded initializer, or
safetensors. Each rank requests its own intervals and gets no more than one parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from gpumix.engine.model.deferred_init import log_of
from gpumix.engine.model.module_buffers import persistent_buffers
from gpumix.engine.quantised.packed_weight import PackedWeight
from gpumix.engine.sharding.shard import Source
from gpumix.engine.sharding.state_dict import check_names_and_shapes
from gpumix.schema.errors import InputError
from gpumix.schema.files import NotAFileError, check_is_file, why_unreadable


def make_source(model: nn.Module, weights: Path | None = None) -> Source:
    """Return the source of initial values of `model`'s parameters.

    Args:
        weights: a safetensors file or a folder of such files; None: the model's own values.

    Raises:
        InputError: the files cannot be read, lack a parameter or have it in another shape; or, when
            a value is requested, the model has no value and no initializer.
    """
    return (
        _make_model_source(model)
        if weights is None
        else _make_file_source(_SafetensorsFiles(weights), model)
    )


def find_unused_tensors(model: nn.Module, weights: Path) -> list[str]:
    """Return the names of tensors in `weights` that are no parameters or buffers of `model`."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return sorted(_SafetensorsFiles(weights).holding.keys() - known)


def load_buffers(model: nn.Module, weights: Path) -> None:
    """Load `model`'s persistent buffers (running statistics, say) from `weights`; buffers not in
    there stay as is."""
    files = _SafetensorsFiles(weights)
    loaded: dict[torch.Tensor, torch.Tensor] = {}  # files hold shared buffers under one name
    owned: list[tuple[nn.Module, str, torch.Tensor]] = []
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if buffer is None or key in module._non_persistent_buffers_set:
                continue
            owned.append((module, key, buffer))
            if buffer not in loaded and name in files.holding:
                with files.open_tensor(name) as tensor:
                    loaded[buffer] = tensor[...].to(buffer.dtype)
    for module, key, buffer in owned:
        module._buffers[key] = loaded.get(buffer, buffer)


def _make_model_source(model: nn.Module) -> Source:
    log = log_of(model)

    def source(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
        if isinstance(parameter, PackedWeight):
            return _read_packed(source, name, parameter, start, end)
        if not parameter.is_meta:
            return parameter.detach().reshape(-1)[start:end]
        if log is None:
            raise InputError(
                f"parameter '{name}' is on the meta device and nothing says what its values are",
                fix="build the model with gpumix.build(function, seed), or give `weights`",
            )
        # A transformer's parameters are made one at a time, in full: the largest is an embedding.
        return log.materialize(parameter).reshape(-1)[start:end]

    return source


def _read_packed(
    source: Source, name: str, parameter: PackedWeight, start: int, end: int
) -> torch.Tensor:
    """Return bytes [start, end) of a quantised parameter. If it is still to be quantised, its
    values come from `source`, and are quantised in full, on the host: all ranks get equal bytes."""
    form, tensors = parameter.format, parameter.tensors()
    if tensors is None:
        original = parameter.original
        values = source(name, original, 0, form.shape.numel())
        tensors = form.quantise(values.view(form.shape).cpu())
    return form.read(tensors, start, end)


def _make_file_source(files: _SafetensorsFiles, model: nn.Module) -> Source:
    # A file holds tied parameters once, under any of their names.
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shapes = files.shapes
    found = {p: next((n for n in own if n in shapes), own[0]) for p, own in names.items()}
    wanted = {found[id(p)]: p.shape for p in model.parameters()}
    wanted |= {n: b.shape for n, b in persistent_buffers(model).items() if n in shapes}
    check_names_and_shapes(
        wanted,
        {name: shapes[name] for name in wanted if name in shapes},
        "the weights are those of another model",
        where=str(files.path),
        fix="take the model's configuration from beside the weights (config.json), or leave the "
        "weights out to begin anew",
    )

    def source(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
        if isinstance(parameter, PackedWeight):
            return _read_packed(source, name, parameter, start, end)
        with files.open_tensor(found[id(parameter)]) as tensor:
            return _read_interval(tensor, parameter.shape, start, end)

    return source


class _SafetensorsFiles:
    """Safetensors file, or all files of a folder; `holding` has the file of each tensor, `shapes`
    the shape."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise InputError(
                "found no .safetensors file",
                where=str(path),
                fix="give the folder that `save_pretrained` wrote, or one .safetensors file",
            )
        self.holding: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        for file in files:
            with _open_safetensors(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    self.holding[name] = file
                    self.shapes[name] = opened.get_slice(name).get_shape()

    @contextlib.contextmanager
    def open_tensor(self, name: str) -> Iterator[Any]:
        """Open tensor `name`, without reading it."""
        with _open_safetensors(self.holding[name]) as opened:
            yield opened.get_slice(name)


@contextlib.contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
    try:
        check_is_file(file)  # opening anything else may block with Python's lock held
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise InputError(
            "cannot read the weights",
            where=str(file),
            why=why_unreadable(error) if isinstance(error, NotAFileError) else str(error),
            fix="give a whole file in the safetensors format that you may read",
        ) from error


def _read_interval(tensor: Any, shape: torch.Size, start: int, end: int) -> torch.Tensor:
    """Return elements [start, end) of a tensor on disk, flattened; reads only the rows needed."""
    if not shape:
        return tensor[...].reshape(-1)[start:end]
    row = max(1, shape[1:].numel())
    first, last = start // row, -(-end // row)
    return tensor[first:last].reshape(-1)[start - first * row : end - first * row]
