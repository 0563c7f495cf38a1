"""What a unit's forward leaves in its buffers: running statistics, counters.

The forward pass updates them, once per micro-batch. The recompute must start from what the forward
pass started from, and change nothing: it runs on copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

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
    """Copies of the buffers that one call of a unit changes, made before it.

    Args:
        owners: the unit's modules with buffers.
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

    def keep_changed(self) -> None:
        """After the call: forget the modules that it left alone."""
        # By module, for batch norm updates its statistics unseen, but counts its calls in the open.
        self._owners = [owner for owner in self._owners if owner.changed]
        for owner in self._owners:
            owner.found.clear()

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
