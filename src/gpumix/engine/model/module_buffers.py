"""Buffers that forward updates: running statistics, counters.

The forward pass updates buffers once per micro-batch. The recompute must start from the same values
as the forward pass and change nothing, so it runs on copies. A reverted step changes nothing
either. Ranks see different samples; buffers in the model's state come from one rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gpumix.engine.comm.communicator import Communicator

Tensors = dict[str, torch.Tensor | None]


@dataclass
class _OwnedBuffers:
    """A module with its buffers before the call and copies of the values."""

    module: nn.Module
    found: Tensors
    versions: dict[str, int]
    copies: Tensors

    @property
    def changed(self) -> bool:
        return any(
            self.module._buffers[name] is not tensor
            or (tensor is not None and tensor._version != self.versions[name])
            for name, tensor in self.found.items()
        )


class BufferCopies:
    """Copies of the buffers that a call changes, made before the call.

    Args:
        owners: the called modules with buffers.
    """

    def __init__(self, owners: Iterable[nn.Module]) -> None:
        self._owners = [
            _OwnedBuffers(
                owner,
                dict(owner._buffers),
                {n: b._version for n, b in owner._buffers.items() if b is not None},
                {n: None if b is None else b.clone() for n, b in owner._buffers.items()},
            )
            for owner in owners
        ]

    def keep_changed(self) -> list[nn.Module]:
        """Keep only copies of modules changed by the call, and return the modules."""
        # By module: batch norm updates its statistics without a new version, but counts its calls.
        self._owners = [owner for owner in self._owners if owner.changed]
        for owner in self._owners:
            owner.found.clear()
        return [owner.module for owner in self._owners]

    def restore(self) -> None:
        """Restore the buffers to the values before the call."""
        for owner in self._owners:
            owner.module._buffers.update(owner.copies)

    @contextlib.contextmanager
    def use_copies(self) -> Iterator[None]:
        """Run the body on the buffers from before the call; restore the current buffers on exit."""
        current = [dict(owner.module._buffers) for owner in self._owners]
        for owner in self._owners:
            owner.module._buffers.update(
                {n: None if c is None else c.clone() for n, c in owner.copies.items()}
            )
        try:
            yield
        finally:
            for owner, tensors in zip(self._owners, current):
                owner.module._buffers.update(tensors)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers in a model's state dict, by all of their names."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def find_buffer_owners(model: nn.Module) -> list[nn.Module]:
    """Return the modules with persistent buffers."""
    return [m for m in model.modules() if m._buffers.keys() - m._non_persistent_buffers_set]


def broadcast_buffers(model: nn.Module, comm: Communicator, source: Callable[[str], int]) -> None:
    """Broadcast each persistent buffer from its `source` rank, as DDP does. Collective."""
    unique = {id(buffer): (name, buffer) for name, buffer in persistent_buffers(model).items()}
    for name, buffer in unique.values():
        comm.broadcast(buffer, source(name), f"broadcast of buffer '{name}'")
