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

from gpumix.integrations.common.run_recorder import TrainingRecorder
from gpumix.integrations.dataloader.sharded_loader import (
    RankBatchSampler,
    RankLoader,
)

BATCHES_KEY, RNG_STATE_KEY = "batches", "random_numbers"


class PlannedLoader:
    """Loader opened at its first batch. Attributes of the user's loader, such as its sampler, are
    passed on.

    Args:
        record: measures the wait for batches.
        given: the user's loader.
    """

    def __init__(self, loader: RankLoader, record: TrainingRecorder, given: Any) -> None:
        self._loader = loader
        self._given = given
        self._record = record
        self._batches = 0  # of this epoch, given so far
        self._epoch_rng_state: Tensor | None = None
        self._goes_on: dict[str, Any] | None = None

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    @property
    def batch_sampler(self) -> Any:
        """Batch sampler for Lightning to set epochs on."""
        part = self._loader.batch_sampler
        return part.batch_sampler if isinstance(part, RankBatchSampler) else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._given, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        skipped = 0
        if self._goes_on is not None:
            torch.set_rng_state(self._goes_on[RNG_STATE_KEY])
            skipped, self._goes_on = self._goes_on[BATCHES_KEY], None
        self._epoch_rng_state = torch.get_rng_state()
        self._batches = skipped
        batches = self._loader.after(skipped)
        while (batch := self._record.next_of(batches)) is not None:
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position; within an epoch with the random state of its begin."""
        length = None if isinstance(self.dataset, IterableDataset) else len(self)
        over = self._epoch_rng_state is None or self._batches == length
        return {
            BATCHES_KEY: 0 if over else self._batches,
            RNG_STATE_KEY: torch.get_rng_state() if over else self._epoch_rng_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._goes_on = state
