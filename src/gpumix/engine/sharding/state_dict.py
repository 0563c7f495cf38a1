"""State of a sharded model and its optimizer, by the model's own names.

Full tensors serve for ordinary state dicts, this rank's parts for checkpoints. Neither depends on
the plan, so state saved by one plan loads into another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.model.extra_state import find_extra_state_modules
from gpumix.engine.model.module_buffers import persistent_buffers
from gpumix.engine.sharding.flat_group import FlatGroup
from gpumix.engine.sharding.parameter_index import ParameterIndex
from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.engine.sharding.shard import Piece
from gpumix.schema.errors import InputError

Scalar = torch.Tensor | bool | int | float
T = TypeVar("T")


@dataclass(frozen=True)
class TensorPart:
    """Part of a tensor on this rank, cut like a parameter.

    `local` has elements [start, end) of the window's content, flattened; it may be empty. The
    tensor has a value for every `block` elements of the parameter.
    """

    window: ParameterSlice
    start: int
    end: int
    local: torch.Tensor
    block: int = 1

    @classmethod
    def of(cls, piece: Piece, local: torch.Tensor, block: int = 1) -> TensorPart:
        """Make the part of a piece, with a value for every `block` elements."""
        if block == 1:
            return cls(piece.window, piece.start, piece.end, local)
        window = piece.window.of_blocks(block)
        return cls(window, *get_block_range(piece, block), local, block)


TensorParts = tuple[TensorPart, ...]
"""A tensor on this rank: a part of each window here, usually one."""


def get_block_range(piece: Piece, block: int) -> tuple[int, int]:
    """Return the start and end of the blocks of a piece that begins with one."""
    return -(-piece.start // block), -(-piece.end // block)


def get_state_block(optimizer: Optimizer, state: str) -> int:
    """Return the number of elements for each of which the optimizer has a value of a state."""
    blocks: Collection[str] = getattr(optimizer, "block_states", ())
    return int(getattr(optimizer, "block", 1)) if state in blocks else 1


@dataclass(frozen=True)
class WholeTensor:
    """Uncut tensor of a full parameter, equal on every rank."""

    tensor: torch.Tensor


# Parameter name -> name of a state -> its value.
OptimizerState = dict[str, dict[str, TensorParts | WholeTensor | Scalar]]


# -- the model -------------------------------------------------------------------------------------


def gather_full_state(
    model: nn.Module,
    groups: Iterable[FlatGroup],
    comm: Communicator,
    inventory: ParameterIndex,
    *,
    rank0_only: bool,
    skipped: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Return `state_dict` of the unsharded model, on the CPU. Collective.

    Trained parameters are in fp32, frozen ones in the plan's communication dtype, packed ones are
    bytes. Names of a tied
    parameter share one tensor. With `rank0_only`, other ranks get an empty dict. Pieces called
    `skipped` are left out. In addition to the result, a rank has at most one flat group in memory.
    """
    keep = comm.rank == 0 or not rank0_only
    values: dict[str, torch.Tensor] = {}
    for group in groups:
        if all(piece.name in skipped for piece in group.pieces):
            continue
        for piece, value in group.gather_masters():
            first = inventory.parameters[piece.name].rank == comm.rank
            if keep or first:
                values[piece.name] = value.to("cpu", copy=True)
    if not inventory.is_single_stage:
        _broadcast_parameters(values, comm, inventory, skipped)
    if not keep:
        return {}
    state = {name: values[own] for name, own in inventory.names.items() if own not in skipped}
    for name, buffer in persistent_buffers(model).items():
        state[name] = buffer.detach().to("cpu", copy=True)
    for name, module in find_extra_state_modules(model).items():
        state[name] = module.get_extra_state()
    return state


def expand_quantised(
    state: Mapping[str, torch.Tensor], inventory: ParameterIndex
) -> dict[str, torch.Tensor]:
    """Return a state dict with quantised parameters as their library saves them, in several
    tensors."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        form = inventory.find_format(name)
        if form is None:
            found[name] = value
            continue
        names = form.entry_names(name)
        for suffix, tensor in form.state_entries(form.views(value)).items():
            found[names[suffix]] = tensor
    return found


def _broadcast_parameters(
    values: dict[str, torch.Tensor],
    comm: Communicator,
    inventory: ParameterIndex,
    skipped: Collection[str],
) -> None:
    """Broadcast parameters between stages, a parameter at a time."""
    for name, stored in inventory.parameters.items():
        if name in skipped:
            continue
        value = values.get(name)
        if value is None or comm.rank != stored.rank:
            value = torch.empty(stored.shape, dtype=stored.dtype)
        there = value.to(comm.device).contiguous()
        comm.broadcast(there, stored.rank, f"broadcast of parameter '{name}'")
        values[name] = there.to("cpu")


@torch.no_grad()
def load_full_state(
    model: nn.Module,
    groups: Iterable[FlatGroup],
    inventory: ParameterIndex,
    state: Mapping[str, torch.Tensor],
    *,
    strict: bool,
) -> None:
    """Load this rank's intervals from ordinary full tensors, under any name of a tied parameter.
    Without `strict`, parameters without a tensor stay as is.

    Raises:
        InputError: names are missing or unexpected, or shapes differ; nothing was changed.
    """
    names, extra = inventory.names, find_extra_state_modules(model)
    state = _pack_entries(state, inventory)
    beside = {name: value for name, value in state.items() if name in extra}
    state = {name: value for name, value in state.items() if name not in extra}
    given = {own: state[name] for name, own in names.items() if name in state}
    buffers = persistent_buffers(model)
    given_buffers = {name: state[name] for name in buffers if name in state}
    wanted = {name: stored.shape for name, stored in inventory.parameters.items()}
    wanted |= {name: buffer.shape for name, buffer in buffers.items()}
    shapes = {name: value.shape for name, value in (given | given_buffers).items()}
    shapes |= {name: v.shape for name, v in state.items() if name not in {*names, *buffers}}
    if not strict:
        wanted = {name: shape for name, shape in wanted.items() if name in shapes}
    check_names_and_shapes(
        wanted, shapes, "the state dict does not fit the model", code="state-dict-of-another-model"
    )
    pieces = [piece for group in groups for piece in group.pieces]
    for piece in (piece for piece in pieces if piece.name in given):
        shown = piece.window.of(given[piece.name]).reshape(-1)
        piece.local.copy_(shown[piece.start : piece.end])
    for name, value in given_buffers.items():
        buffers[name].copy_(value)
    for name, value in beside.items():
        extra[name].set_extra_state(value)


def _pack_entries(
    state: Mapping[str, torch.Tensor], inventory: ParameterIndex
) -> dict[str, torch.Tensor]:
    """Return a state dict with quantised parameters as bytes, given so or as their library saves
    them."""
    found = dict(state)
    for name in inventory.names:
        form = inventory.find_format(name)
        if form is None or name not in found or found[name].shape == (form.nbytes,):
            continue
        flat = form.pack_entries(name, found)
        for key in form.entry_names(name).values():
            del found[key]
        found[name] = flat
    return found


def check_names_and_shapes(
    wanted: Mapping[str, Sequence[int]],
    given: Mapping[str, Sequence[int]],
    what: str,
    *,
    code: str,
    where: str = "",
    fix: str = "give the state of this very model",
) -> None:
    """Raise an InputError with the reason, if names or shapes differ."""
    missing = [name for name in wanted if name not in given]
    unexpected = [name for name in given if name not in wanted]
    differing = [
        f"{name} is {tuple(given[name])}, the model wants {tuple(shape)}"
        for name, shape in wanted.items()
        if name in given and tuple(given[name]) != tuple(shape)
    ]
    found = [("missing", missing), ("unexpected", unexpected), ("another shape", differing)]
    why = "; ".join(f"{kind}: {join_some_names(names)}" for kind, names in found if names)
    if why:
        raise InputError(what, code=code, where=where, why=why, fix=fix)


def join_some_names(names: Sequence[str]) -> str:
    """Join the first few names, with the number of further names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# -- the optimizer ---------------------------------------------------------------------------------


def collect_optimizer_state(pieces: Iterable[Piece], optimizer: Optimizer) -> OptimizerState:
    """Return the optimizer's state of this rank's pieces, by parameter name, without copies.

    Tensors of a piece's shape become parts; 0-dimensional tensors and numbers stay as is. States
    named in the optimizer's `whole_states` are of full parameters, those in `block_states` have a
    value for each of its blocks. Hyperparameters (`lr`, ...) are not state.

    Raises:
        InputError: the optimizer is for other parameters, or has state that belongs to no element.
    """
    pieces = list(pieces)
    _check_optimizer_parameters(pieces, optimizer)
    wholes: Collection[str] = getattr(optimizer, "whole_states", ())
    found: OptimizerState = {}
    for piece in pieces:
        if piece.parameter not in optimizer.state:
            continue
        states = found.setdefault(piece.name, {})
        for name, value in optimizer.state[piece.parameter].items():
            if value is None:
                continue
            new = (
                WholeTensor(value.detach())
                if name in wholes
                else _make_state_value(piece, name, value, get_state_block(optimizer, name))
            )
            states[name] = append_part(states.get(name), new)
    return found


def append_part(before: TensorParts | T | None, more: TensorParts | T) -> TensorParts | T:
    """Append a part to a cut tensor; return any other `more` as is."""
    if isinstance(before, tuple) and isinstance(more, tuple):
        return (*before, *more)
    return more


def _check_optimizer_parameters(pieces: Iterable[Piece], optimizer: Optimizer) -> None:
    ours = {id(piece.parameter) for piece in pieces}
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in updated if id(p) not in ours and p.numel()]
    if foreign:
        raise InputError(
            f"the optimizer updates {len(foreign)} tensor(s) that are not the engine's",
            code="optimizer-of-foreign-tensors",
            why="a sharded model's parameters are pieces of the model's own",
            fix="make the optimizer from engine.parameters() or engine.named_parameters()",
        )


def _make_state_value(piece: Piece, name: str, value: object, block: int) -> TensorParts | Scalar:
    if isinstance(value, torch.Tensor):
        if block > 1 or value.shape == piece.local.shape:
            return (TensorPart.of(piece, value.detach(), block),)
        if value.dim() == 0:
            return value.detach()
    elif isinstance(value, (bool, int, float)):
        return value
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise InputError(
        f"the optimizer's state '{name}' of parameter '{piece.name}' cannot be cut anew",
        code="optimizer-state-not-divisible",
        why=f"it is {shape}: neither one value for each of the {piece.local.numel()} elements "
        "that this rank stores, nor a single number",
        fix="use an optimizer that treats elements one by one, such as torch.optim.AdamW, or "
        "gpumix.Adafactor or gpumix.Muon",
    )


def load_optimizer_state(
    pieces: Iterable[Piece], optimizer: Optimizer, state: OptimizerState
) -> None:
    """Replace the optimizer's state; hyperparameters stay.

    Raises:
        InputError: the optimizer is for other parameters, or the state is cut by another plan.
    """
    pieces = list(pieces)
    _check_optimizer_parameters(pieces, optimizer)
    by_local = {id(piece.parameter): piece for piece in pieces}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    updated = [(n, by_local[id(p)]) for n, p in enumerate(parameters) if id(p) in by_local]
    names = {piece.name for _, piece in updated}
    absent = [name for name in state if name not in names]
    if absent:
        raise InputError(
            f"the optimizer does not update {join_some_names(absent)}, for which there is state",
            code="optimizer-state-mismatch",
            fix="give the optimizer the parameters that it had before",
        )
    packed = optimizer.state_dict()
    packed["state"] = {
        number: {
            key: _select_local_state(piece, key, value, get_state_block(optimizer, key))
            for key, value in state[piece.name].items()
        }
        for number, piece in updated
        if piece.name in state
    }
    optimizer.load_state_dict(packed)


def _select_local_state(
    piece: Piece, key: str, value: TensorParts | WholeTensor | Scalar, block: int
) -> Scalar:
    if isinstance(value, WholeTensor):
        value = value.tensor
    if not isinstance(value, tuple):
        # Optimizers count in place: no two parameters or pieces may share a tensor.
        return value.clone() if isinstance(value, torch.Tensor) else value
    wanted = TensorPart.of(piece, piece.local, block)
    for part in value:
        if (part.window, part.start, part.end) == (wanted.window, wanted.start, wanted.end):
            return part.local
    held = ", ".join(f"{part.start} to {part.end}" for part in value)
    raise InputError(
        f"the optimizer's state '{key}' of parameter '{piece.name}' is cut by another plan",
        code="optimizer-state-of-other-plan",
        why=f"it holds elements {held}, this rank stores {wanted.start} to {wanted.end}",
        fix="take it through a checkpoint, which any plan can load",
    )
