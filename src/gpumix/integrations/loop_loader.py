"""Loaders that tell Accelerate where a loop is, and this rank's part of the batch that it is at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from gpumix.integrations.own_batches import OwnLoader, Part


class Loader(OwnLoader, DataLoaderStateMixin):
    """Tells Accelerate where the loop is.

    Attributes:
        skipped: batches at the beginning of each epoch that are passed over.
        given: this rank's part of the batch that the loop is at.
        handed: what the loop has of it.
        next_of: takes the next of its batches, None behind the last.
        made_of: the loader that was prepared.
    """

    device: torch.device
    made_of: DataLoader[Any]
    next_of: Callable[[Iterator[Any]], Any]
    iteration = 0
    skipped = 0
    given: Part | None = None
    handed: Any = None

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skipped)

    def set_epoch(self, epoch: int) -> None:
        """From which the loop goes on to count."""
        self.iteration = epoch
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.gradient_state = GradientState()
        self.reset()
        self.gradient_state._add_dataloader(self)
        self.set_epoch(self.iteration)
        batches = self.after(self.skipped)
        try:
            following = self.next_of(batches)
            while following is not None:
                self.given, following = following, self.next_of(batches)
                self.end_of_dataloader = following is None
                self.handed = send_to_device(self.given.values, self.device)
                yield self.handed
        finally:
            self.given = self.handed = None
            self.iteration += 1
            self.gradient_state._remove_dataloader(self)


def part_at(values: Any = None) -> Part | None:
    """This rank's part of the batch that the loop is at: of the loader that some of the values come
    from, where it reads several at once; else of the one that it began to read last."""
    state = GradientState()
    open_ones = [one for one in state.dataloader_references if isinstance(one, Loader)]
    if len(open_ones) > 1 and (known := _storages(values)):
        for one in open_ones:
            if known & _storages(one.handed):
                return one.given
    return state.active_dataloader.given if isinstance(state.active_dataloader, Loader) else None


def _storages(values: Any) -> set[int]:
    """Of the tensors in them that have memory."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel())
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
