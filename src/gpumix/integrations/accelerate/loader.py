"""Loaders reporting a loop's position to Accelerate, and this rank's part of the current batch."""

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

from gpumix.integrations.dataloader.sharded_loader import RankLoader, RankPart


class LoopLoader(RankLoader, DataLoaderStateMixin):
    """Loader reporting the loop's position to Accelerate.

    Attributes:
        skipped: batches to skip at the beginning of each epoch.
        given: this rank's part of the current batch.
        handed: the values of `given` on the device, as the loop has them.
        next_of: takes the next batch of an iterator, None at the end.
        source_loader: the loader that was prepared.
    """

    device: torch.device
    source_loader: DataLoader[Any]
    next_of: Callable[[Iterator[Any]], Any]
    iteration = 0
    skipped = 0
    given: RankPart | None = None
    handed: Any = None

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skipped)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and count on from it."""
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


def get_current_part(values: Any = None) -> RankPart | None:
    """Return this rank's part of the loop's current batch. With several open loaders, the loader
    that some of the values come from counts; otherwise the loader opened last."""
    state = GradientState()
    open_ones = [one for one in state.dataloader_references if isinstance(one, LoopLoader)]
    if len(open_ones) > 1 and (known := _find_storages(values)):
        for one in open_ones:
            if known & _find_storages(one.handed):
                return one.given
    return (
        state.active_dataloader.given if isinstance(state.active_dataloader, LoopLoader) else None
    )


def _find_storages(values: Any) -> set[int]:
    """Return the storages of all tensors that have memory."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel())
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
