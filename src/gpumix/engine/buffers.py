"""What forward leaves in buffers: running statistics, counters.

The forward pass updates them, once per micro-batch. The recompute must start from what the forward
pass started from, and change nothing: it runs on copies. A step that is taken back has changed
nothing either. Ranks see different samples; what belongs to the model's state is that of one rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gpumix.engine.comm import Communicator

Tensors = dict[str, torch.Tensor | None]


@dataclass
class _Owner:
    """A module, its buffers before the call, and copies of their values then."""

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
    """Copies of the buffers that a call changes, made before it.

    Args:
        owners: the modules with buffers that it calls.
    """

    def __init__(self, owners: Iterable[nn.Module]) -> None:
        self._owners = [
            _Owner(
                owner,
                dict(owner._buffers),
                {n: b._version for n, b in owner._buffers.items() if b is not None},
                {n: None if b is None else b.clone() for n, b in owner._buffers.items()},
            )
            for owner in owners
        ]

    def keep_changed(self) -> list[nn.Module]:
        """After the call: forget the modules that it left alone; the others are returned."""
        # By module, for batch norm updates its statistics unseen, but counts its calls in the open.
        self._owners = [owner for owner in self._owners if owner.changed]
        for owner in self._owners:
            owner.found.clear()
        return [owner.module for owner in self._owners]

    def restore(self) -> None:
        """The modules have what they had before the call."""
        for owner in self._owners:
            owner.module._buffers.update(owner.copies)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The module's buffers are inside what they were before the call; those of now return."""
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
    """The buffers that belong to a model's state dict, by all of their names."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def keepers(model: nn.Module) -> list[nn.Module]:
    """The modules with persistent buffers."""
    return [m for m in model.modules() if m._buffers.keys() - m._non_persistent_buffers_set]


def agree(model: nn.Module, comm: Communicator, source: Callable[[str], int]) -> None:
    """Give all ranks the persistent buffers of one of them, as DDP does: each by its own `source`.
    Collective."""
    unique = {id(buffer): (name, buffer) for name, buffer in persistent_buffers(model).items()}
    for name, buffer in unique.values():
        comm.broadcast(buffer, source(name), f"broadcast of buffer '{name}'")
