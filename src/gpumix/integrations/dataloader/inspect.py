"""A program's `DataLoader` taken apart, for each rank to read its part of every batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from gpumix.hardware.runtime import is_available
from gpumix.integrations.common.batch_rows import RowAssignment
from gpumix.integrations.dataloader.samplers import FullBatchSampler, share_order
from gpumix.integrations.dataloader.sharded_loader import L, RankCollator, make_rank_loader
from gpumix.schema.errors import InputError


@dataclass(frozen=True)
class Batching:
    """Batching settings of a loader; a stream has no sampler."""

    loader: DataLoader[Any]
    batch_size: int
    sampler: Any
    drop_last: bool

    @classmethod
    def of(cls, loader: Any) -> Batching:
        """Take a loader apart.

        Raises:
            InputError: batches of this loader cannot be divided by a plan.
        """
        if not isinstance(loader, DataLoader):
            raise InputError(
                f"a {type(loader).__name__} gives the batches",
                code="loader-unsupported",
                why="the plan says who reads which samples of each, so it reads their dataset",
                fix="give a torch.utils.data.DataLoader",
            )
        if not loader.in_order:
            raise InputError(
                "the DataLoader gives batches out of order, with in_order=False",
                code="loader-out-of-order",
                why="each rank reads its part of the same batches",
                fix="leave in_order out",
            )
        if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
            return cls(loader, loader.batch_size, None, loader.drop_last)
        batches = loader.batch_sampler
        batches = getattr(batches, "_batch_sampler", batches)  # Lightning's wrapper for prediction
        if type(batches) is not BatchSampler:
            raise InputError(
                "the DataLoader has a batch sampler of its own",
                code="loader-batch-sampler",
                why="a batch is cut by the plan, and must say how many samples it has",
                fix="DataLoader(dataset, batch_size=..., sampler=...)",
            )
        return cls(loader, batches.batch_size, batches.sampler, batches.drop_last)

    def of_whole(self, samples: int) -> Batching:
        """Adapt to global batches of `samples` samples: with `drop_last`, the last samples not
        filling a global batch are dropped."""
        if not self.drop_last or self.sampler is None:
            return self
        return replace(
            self, sampler=FullBatchSampler(share_order(self.sampler), samples), drop_last=False
        )

    def make_rank_loader(
        self,
        batch_size: int,
        rows: RowAssignment,
        collate: RankCollator,
        kind: type[L],
        *,
        most: int | None = None,
    ) -> L:
        """Return a loader of this rank's part of global batches of `batch_size`, in the loader's
        order. Batches larger than `most` come in parts."""
        loader = self.loader
        return make_rank_loader(
            loader.dataset,
            batch_size=batch_size,
            rows=rows,
            collate=collate,
            sampler=share_order(self.sampler),
            most=most,
            drop_last=self.drop_last,
            kind=kind,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory and is_available(),
            persistent_workers=loader.persistent_workers,
            prefetch_factor=loader.prefetch_factor,
            generator=loader.generator,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )
