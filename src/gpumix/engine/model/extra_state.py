"""Extra state of modules besides parameters and buffers, from `get_extra_state`."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gpumix.engine.comm.communicator import Communicator
from gpumix.schema.errors import InputError, format_in_one_line

EXTRA_STATE_KEY = "_extra_state"  # torch's key in a state dict


def find_extra_state_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules with extra state, by the state's name in a state dict."""
    return {
        f"{path}.{EXTRA_STATE_KEY}" if path else EXTRA_STATE_KEY: module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def broadcast_extra_state(
    model: nn.Module, comm: Communicator, source: Callable[[str], int]
) -> None:
    """Broadcast each module's extra state from its `source` rank. Collective."""
    if comm.world == 1:
        return
    for name, module in find_extra_state_modules(model).items():
        rank = source(name)
        own = _serialize_state(name, module)  # on all ranks, so that all refuse if a rank does
        size = torch.tensor([len(own)], device=comm.device)
        comm.broadcast(size, rank, f"broadcast of the size of '{name}'")
        told = torch.empty(int(size), dtype=torch.uint8, device=comm.device)
        if comm.rank == rank:
            told.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        comm.broadcast(told, rank, f"broadcast of '{name}'")
        if comm.rank != rank:
            module.set_extra_state(_deserialize_state(bytes(told.tolist())))


def pack_extra_state(model: nn.Module) -> dict[str, str]:
    """Return the states as text, by name.

    Raises:
        InputError: a state cannot be read back without running code.
    """
    return {
        name: base64.b64encode(_serialize_state(name, module)).decode()
        for name, module in find_extra_state_modules(model).items()
    }


def load_extra_state(model: nn.Module, states: Mapping[str, str]) -> None:
    """Restore the states of modules."""
    for name, module in find_extra_state_modules(model).items():
        module.set_extra_state(_deserialize_state(base64.b64decode(states[name])))


def _serialize_state(name: str, module: nn.Module) -> bytes:
    written = io.BytesIO()
    try:
        torch.save(module.get_extra_state(), written)
        _deserialize_state(written.getvalue())
    except Exception as error:  # a module may keep anything
        raise InputError(
            f"{type(module).__name__} keeps a state that no checkpoint can hold",
            code="extra-state-not-storable",
            where=name,
            why=format_in_one_line(error),
            fix="return tensors, numbers, texts, lists and dictionaries from get_extra_state",
        ) from error
    return written.getvalue()


def _deserialize_state(text: bytes) -> Any:
    return torch.load(io.BytesIO(text), weights_only=True)
