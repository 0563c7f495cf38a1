"""A user's loader in Lightning's interface: this rank's part of global batches.

The loader knows its position: a run stopped within an epoch resumes there, in the epoch's order of
samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from gpumix.integrations.common.batch_rows import Rows
from gpumix.integrations.common.run_recorder import TrainingRecord
from gpumix.integrations.dataloader.inspect import Batching
from gpumix.integrations.dataloader.sharded_loader import CollatedTree, OwnLoader, OwnPart, Width

BATCHES, NUMBERS = "batches", "random_numbers"


class PlannedLoader:
    """Loader opened at its first batch. Attributes of the user's loader, such as its sampler, are
    passed on.

    Args:
        record: measures the wait for batches.
        given: the user's loader.
    """

    def __init__(self, loader: OwnLoader, record: TrainingRecord, given: Any) -> None:
        self._loader = loader
        self._given = given
        self._record = record
        self._batches = 0  # of this epoch, given so far
        self._begun_with: Tensor | None = None
        self._goes_on: dict[str, Any] | None = None

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def batch_sampler(self) -> Any:
        """Batch sampler for Lightning to set epochs on."""
        part = self._loader.batch_sampler
        return part.batch_sampler if isinstance(part, OwnPart) else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._given, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        skipped = 0
        if self._goes_on is not None:
            torch.set_rng_state(self._goes_on[NUMBERS])
            skipped, self._goes_on = self._goes_on[BATCHES], None
        self._begun_with = torch.get_rng_state()
        self._batches = skipped
        batches = self._loader.after(skipped)
        while (batch := self._record.next_of(batches)) is not None:
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position; within an epoch with the random state of its begin."""
        over = self._begun_with is None or self._batches == _length(self._loader)
        return {
            BATCHES: 0 if over else self._batches,
            NUMBERS: torch.get_rng_state() if over else self._begun_with,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._goes_on = state


def planned_loader(
    given: Batching, batch_size: int, rows: Rows, record: TrainingRecord, width: Width
) -> PlannedLoader:
    """Return this rank's part of a loader's global batches of `batch_size` samples."""
    collate = CollatedTree(given.loader.collate_fn, width)
    own = given.own_part(batch_size, rows, collate, OwnLoader)
    return PlannedLoader(own, record, given.loader)


def _length(loader: OwnLoader) -> int | None:
    return None if isinstance(loader.dataset, IterableDataset) else len(loader)
