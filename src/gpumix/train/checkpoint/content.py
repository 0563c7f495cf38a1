"""Content of a checkpoint: the state of an engine and an optimizer by name.

model.<name>                      parameters (trained ones in fp32) and persistent buffers
optimizer.<parameter>.<state>     shaped like the parameter, or by blocks of its elements, or one
                                  tensor or number for all of it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

import gpumix
from gpumix.engine.engine import Engine
from gpumix.engine.model import extra_state
from gpumix.engine.model.extra_state import find_extra_state_modules
from gpumix.engine.model.frozen_base import FrozenBase
from gpumix.engine.model.module_buffers import persistent_buffers
from gpumix.engine.optimizers.state_needed import get_required_state
from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.engine.sharding.shard import Piece
from gpumix.engine.sharding.state_dict import (
    OptimizerState,
    Scalar,
    TensorPart,
    TensorParts,
    WholeTensor,
    append_part,
    check_names_and_shapes,
    get_block_range,
)
from gpumix.hardware import runtime
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.schema.errors import InputError
from gpumix.schema.plan.optimizer_state import QUANTISED_BLOCK
from gpumix.train.checkpoint.dcp_storage import BoxedTensor, Index, StoredTensor
from gpumix.train.checkpoint.host_copy import Tensors
from gpumix.train.checkpoint.manifest import (
    INDEX,
    Manifest,
    SavedBase,
    SavedOptimizer,
    StateKind,
    make_damaged_error,
)

MODEL = "model"
OPTIMIZER = "optimizer"
OWN_JOB_FIX = "resume with the model settings of the job that saved it"

_NUMBERS: dict[StateKind, type] = {"int": int, "float": float, "bool": bool}
# Dtypes storing a Python number without rounding.
_DTYPES: dict[StateKind, torch.dtype] = {
    "int": torch.int64,
    "float": torch.float64,
    "bool": torch.bool,
}


# -- saving ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """This rank's current content of a checkpoint; only buffers are copied."""

    tensors: Tensors
    kinds: dict[str, StateKind]
    manifest: Manifest

    @classmethod
    def of(
        cls,
        step: int,
        engine: Engine,
        optimizer: Optimizer,
        *,
        cursor: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> Content:
        """Collect the content; `cursor` and `extra` are JSON values. The manifest describes only
        this rank's optimizer states, and no files."""
        state = engine.optimizer_state(optimizer)
        kinds = kinds_of(state)
        manifest = Manifest(
            step=step,
            model=engine.plan.model,
            gpumix=gpumix.__version__,
            torch=torch.__version__,
            engine_steps=engine.steps,
            losses_counted=engine.losses_counted.item(),
            scaler=engine.scaler.state_dict() if engine.scaler.active else None,
            optimizer=SavedOptimizer(name=type(optimizer).__name__, states=kinds),
            base=_describe_base(engine.base),
            cursor=to_json_values(cursor, "cursor"),
            extra=to_json_values(extra, "extra"),
            extra_states=extra_state.pack_extra_state(engine.model),
        )
        tensors = {MODEL: collect_model(engine), OPTIMIZER: collect_optimizer(engine, state)}
        return cls(tensors, kinds, manifest)


def _describe_base(base: FrozenBase | None) -> SavedBase | None:
    return None if base is None else SavedBase(name=base.name, checksum=base.checksum)


def to_json_values(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return `values` as loaded back from JSON."""
    try:
        return dict(json.loads(json.dumps(values)))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"'{name}' cannot be kept in a checkpoint",
            code="not-storable-in-checkpoint",
            why=str(error),
            fix="give what JSON can hold",
        ) from error


def copying_stream(device: torch.device) -> runtime.Stream | None:
    """Return a stream for a GPU to copy the state computed so far; None without a GPU."""
    if not runtime.is_gpu(device):
        return None
    stream = runtime.new_stream(device)
    stream.wait_stream(runtime.current_stream(device))
    return stream


def collect_model(engine: Engine) -> dict[str, BoxedTensor]:
    """Return this rank's part of the model. Rank 0 has the buffers, copied because the next forward
    pass may change them."""
    tensors = _by_name((piece.name, _boxed(piece, piece.local)) for piece in _stored(engine))
    if engine.comm.rank == 0:
        buffers = persistent_buffers(engine.model)
        tensors |= {name: BoxedTensor.whole(buffer.clone()) for name, buffer in buffers.items()}
    return tensors


def collect_optimizer(engine: Engine, state: OptimizerState) -> dict[str, dict[str, BoxedTensor]]:
    """Return this rank's part of the optimizer state. State kept once per parameter is written by
    the rank storing the first element: a rank storing no element may lack it."""
    found: dict[str, dict[str, BoxedTensor]] = {}
    for piece in _stored(engine):
        states = found.setdefault(piece.name, {})
        for name, value in state.get(piece.name, {}).items():
            if isinstance(value, tuple):
                own = next(part for part in value if part.window.part == piece.window.part)
                _add(states, name, _boxed_part(piece, own))
            elif piece.has_begin:
                states[name] = BoxedTensor.whole(_tensor(value))
    return found


def _by_name(named: Iterable[tuple[str, BoxedTensor]]) -> dict[str, BoxedTensor]:
    """Collect the boxes of each tensor."""
    found: dict[str, BoxedTensor] = {}
    for name, boxed in named:
        _add(found, name, boxed)
    return found


def _add(found: dict[str, BoxedTensor], name: str, boxed: BoxedTensor) -> None:
    found[name] = found[name].beside(boxed) if name in found else boxed


def _stored(engine: Engine) -> Iterator[Piece]:
    """Yield the pieces saved by this rank; rank 0 includes parameters without elements."""
    for piece in filter(lambda piece: engine.is_saved(piece.name), engine.pieces()):
        if piece.shape.numel() == 0:
            if engine.comm.rank == 0:
                yield piece
        elif piece.start < piece.end and piece.is_saved_here:
            yield piece


def _boxed(piece: Piece, flat: torch.Tensor) -> BoxedTensor:
    return _boxed_part(piece, TensorPart.of(piece, flat))


def _boxed_part(piece: Piece, part: TensorPart) -> BoxedTensor:
    if piece.shape.numel() == 0:
        return BoxedTensor.whole(part.local.view(part.window.shape))
    return BoxedTensor.interval(part.window, part.start, part.local)


def _tensor(value: WholeTensor | Scalar) -> torch.Tensor:
    if isinstance(value, WholeTensor):
        return value.tensor
    return torch.as_tensor(value, dtype=_DTYPES.get(_kind(value)))


def kinds_of(state: OptimizerState) -> dict[str, StateKind]:
    """Return the kind of each optimizer state on this rank."""
    found = [{name: _kind(value) for name, value in values.items()} for values in state.values()]
    return merged_kinds(found)


def merged_kinds(found: Iterable[dict[str, StateKind]]) -> dict[str, StateKind]:
    """Merge the kinds of several parameters or ranks.

    Raises:
        InputError: a state has two kinds.
    """
    merged: dict[str, StateKind] = {}
    for kinds in found:
        for name, kind in kinds.items():
            if merged.setdefault(name, kind) != kind:
                raise InputError(
                    f"the optimizer's state '{name}' is {merged[name]} for one parameter and "
                    f"{kind} for another",
                    code="optimizer-state-mixed",
                    fix="use an optimizer that keeps the same for every parameter",
                )
    return merged


def _kind(value: TensorParts | WholeTensor | Scalar) -> StateKind:
    if isinstance(value, tuple):
        return "elements" if value[0].block == 1 else "blocks"
    if isinstance(value, WholeTensor):
        return "whole"
    if isinstance(value, torch.Tensor):
        return "tensor"
    return next(kind for kind, number in _NUMBERS.items() if type(value) is number)


# -- loading ---------------------------------------------------------------------------------------


def check_fits(engine: Engine, path: Path, manifest: Manifest, index: Index) -> None:
    """Check the checkpoint at `path` against the engine's model.

    Raises:
        InputError: names, shapes, trained parameters, units or the frozen base differ.
    """
    what = "the checkpoint is of another model"
    prefix = f"{MODEL}."
    stored = {
        name.removeprefix(prefix): tensor.shape
        for name, tensor in index.tensors.items()
        if name.startswith(prefix)
    }
    buffers = {name: b.shape for name, b in persistent_buffers(engine.model).items()}
    shapes = {name: shape for name, shape in engine.shapes().items() if engine.is_saved(name)}
    check_names_and_shapes(
        shapes | buffers,
        stored,
        what,
        code="checkpoint-of-another-model",
        where=str(path),
        fix=OWN_JOB_FIX,
    )
    if differing := manifest.extra_states.keys() ^ find_extra_state_modules(engine.model).keys():
        raise InputError(
            what,
            code="checkpoint-of-another-model",
            where=str(path),
            why=f"states of modules differ: {', '.join(sorted(differing))}",
            fix=OWN_JOB_FIX,
        )
    if manifest.model != engine.plan.model:
        raise InputError(
            what,
            code="checkpoint-of-another-model",
            where=str(path),
            why=f"names and shapes are the same, but units, dtypes or frozen parameters are not: "
            f"its fingerprint is {manifest.model}, this one's {engine.plan.model}",
            fix=OWN_JOB_FIX,
        )
    if engine.base is not None and manifest.base is not None:
        saved = FrozenBase(manifest.base.name, manifest.base.checksum)
        engine.base.check_same(saved, str(path))


def check_optimizer(
    path: Path, manifest: Manifest, index: Index, engine: Engine, optimizer: Optimizer
) -> None:
    """Check a checkpoint's optimizer class and its claims about optimizer states. The checkpoint
    must fit the engine's model.

    Raises:
        InputError: it is of another class.
        Damaged: states are missing or not as described.
    """
    name = type(optimizer).__name__
    if name != manifest.optimizer.name:
        raise InputError(
            f"the checkpoint has the state of {manifest.optimizer.name}, the optimizer is {name}",
            code="checkpoint-of-another-optimizer",
            where=str(path),
            fix="resume with the optimizer of the job that saved it",
        )
    for wrong in _wrong_states(manifest.optimizer.states, index, engine, optimizer):
        raise make_damaged_error(path / INDEX, wrong)


def _wrong_states(
    kinds: Mapping[str, StateKind], index: Index, engine: Engine, optimizer: Optimizer
) -> Iterator[str]:
    """Yield descriptions of optimizer states contradicting `kinds` or the engine."""
    shapes, stored = engine.shapes(), _stored_states(engine, kinds, index)
    own: dict[StateKind, Collection[str]] = {
        "whole": getattr(optimizer, "whole_states", ()),
        "blocks": getattr(optimizer, "block_states", ()),
    }
    block = getattr(optimizer, "block", 1)
    for state, kind in kinds.items():
        if any((kind == one) != (state in states) for one, states in own.items()):
            yield f"the optimizer's state '{state}' is no '{kind}'"
        if not any(state in states for states in stored.values()):
            yield f"no parameter has the optimizer's state '{state}'"
    for parameter, states in stored.items():
        for state, tensor in states.items():
            if not _is_kind(kinds[state], tensor, shapes[parameter], block):
                found = f"{tensor.dtype} of shape {tensor.shape}"
                yield f"the state '{state}' of '{parameter}' is no '{kinds[state]}': {found}"
    known = {f"{OPTIMIZER}.{name}.{state}" for name, states in stored.items() for state in states}
    held = (name for name in index.tensors if name.startswith(f"{OPTIMIZER}."))
    yield from (f"nothing is said of '{name}'" for name in held if name not in known)
    yield from _missing_states(stored, engine, optimizer)


def _stored_states(
    engine: Engine, kinds: Mapping[str, StateKind], index: Index
) -> dict[str, dict[str, StoredTensor]]:
    """Return the stored optimizer states of each trained parameter."""
    every = {
        parameter: {state: index.tensors.get(f"{OPTIMIZER}.{parameter}.{state}") for state in kinds}
        for parameter in engine.trained_names()
    }
    return {
        parameter: {state: tensor for state, tensor in states.items() if tensor is not None}
        for parameter, states in every.items()
    }


def _is_kind(kind: StateKind, tensor: StoredTensor, shape: torch.Size, block: int) -> bool:
    """Return whether a stored state matches `kind` for a parameter of `shape`."""
    if kind == "elements":
        return tensor.shape == shape
    if kind == "blocks":
        return tensor.shape == ParameterSlice(shape).of_blocks(block).shape
    return kind == "whole" or (
        tensor.shape == () and tensor.torch_dtype == _DTYPES.get(kind, tensor.torch_dtype)
    )


def _missing_states(
    stored: Mapping[str, Mapping[str, StoredTensor]], engine: Engine, optimizer: Optimizer
) -> Iterator[str]:
    """Yield descriptions of states needed by the optimizer and missing, for parameters with
    state."""
    names = {id(piece.parameter): piece.name for piece in engine.pieces() if piece.shape.numel()}
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if id(p) in names):
            name = names[id(p)]
            states = stored.get(name, {})
            for state, shape in get_required_state(optimizer, group, p).items() if states else ():
                if state not in states:
                    yield f"'{name}' lacks the optimizer's state '{state}'"
                elif shape is not None and states[state].shape != shape:
                    found = f"of shape {states[state].shape}, not {tuple(shape)}"
                    yield f"the state '{state}' of '{name}' is {found}"


Read = Callable[[Mapping[str, BoxedTensor]], None]
"""Fills boxes with the values stored under the boxes' names."""


def restore(
    engine: Engine, optimizer: Optimizer | None, manifest: Manifest, index: Index, read: Read
) -> None:
    """Restore engine and optimizer from a checkpoint; an optimizer of None loads the model
    alone."""
    kinds = manifest.optimizer.states if optimizer is not None else {}
    with count_as_host_memory() if engine.state_on_host else nullcontext():
        room = OptimizerBuffers.made(engine, kinds, index)
    read(box_model(engine) | room.boxed())
    extra_state.load_extra_state(engine.model, manifest.extra_states)
    engine.values_changed()
    if optimizer is not None:
        engine.load_optimizer_state(optimizer, room.state())
    engine.steps = manifest.engine_steps
    engine.losses_counted.fill_(manifest.losses_counted)
    if engine.scaler.active and manifest.scaler is not None:
        engine.scaler.load_state_dict(manifest.scaler)


def box_model(engine: Engine) -> dict[str, BoxedTensor]:
    """Return this rank's part of the model as boxes within the engine's own memory."""
    boxed = _by_name(
        (f"{MODEL}.{piece.name}", _boxed(piece, piece.local))
        for piece in engine.pieces()
        if engine.is_saved(piece.name)
    )
    for name, buffer in persistent_buffers(engine.model).items():
        boxed[f"{MODEL}.{name}"] = BoxedTensor.whole(buffer)
    return boxed


StateBuffer = TensorParts | WholeTensor | torch.Tensor


@dataclass(frozen=True)
class OptimizerBuffers:
    """Memory for this rank's part of the optimizer state until loading is complete."""

    kinds: dict[str, StateKind]
    tensors: dict[str, dict[str, StateBuffer]]

    @classmethod
    def made(cls, engine: Engine, kinds: dict[str, StateKind], index: Index) -> OptimizerBuffers:
        """Allocate memory for all stored states, including empty pieces of this rank: optimizers
        keep state for empty tensors too."""
        tensors: dict[str, dict[str, StateBuffer]] = {}
        for piece in engine.pieces():
            for name, kind in kinds.items():
                stored = index.tensors.get(f"{OPTIMIZER}.{piece.name}.{name}")
                if stored is None:
                    continue
                block = QUANTISED_BLOCK if kind == "blocks" else 1
                room, rooms = (
                    _allocate_buffer(piece, kind, stored, block),
                    tensors.setdefault(piece.name, {}),
                )
                rooms[name] = append_part(rooms.get(name), room)
        return cls(kinds, tensors)

    def boxed(self) -> dict[str, BoxedTensor]:
        return {
            f"{OPTIMIZER}.{parameter}.{name}": _boxed_room(room)
            for parameter, states in self.tensors.items()
            for name, room in states.items()
        }

    def state(self) -> OptimizerState:
        """Return the loaded state, with numbers in the optimizer's types."""
        return {
            parameter: {name: self._typed(name, room) for name, room in states.items()}
            for parameter, states in self.tensors.items()
        }

    def _typed(self, name: str, room: StateBuffer) -> TensorParts | WholeTensor | Scalar:
        number = _NUMBERS.get(self.kinds[name])
        if number is None or not isinstance(room, torch.Tensor):
            return room
        return number(room.item())


def _boxed_room(room: StateBuffer) -> BoxedTensor:
    if isinstance(room, WholeTensor):
        return BoxedTensor.whole(room.tensor)
    if isinstance(room, torch.Tensor):
        return BoxedTensor.whole(room)
    first, *others = [BoxedTensor.interval(part.window, part.start, part.local) for part in room]
    return reduce(BoxedTensor.beside, others, first)


def _allocate_buffer(
    piece: Piece, kind: StateKind, stored: StoredTensor, block: int
) -> StateBuffer:
    if kind in ("elements", "blocks"):
        begin, end = get_block_range(piece, block)
        flat = torch.zeros(end - begin, dtype=stored.torch_dtype, device=piece.local.device)
        return (TensorPart.of(piece, flat, block),)
    if kind == "whole":
        device = piece.local.device
        return WholeTensor(torch.zeros(stored.shape, dtype=stored.torch_dtype, device=device))
    return torch.zeros((), dtype=stored.torch_dtype)
