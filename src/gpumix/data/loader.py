"""Feeds one rank: its share of every global batch, fetched ahead in one background thread.

The plan's shares decide who reads what, never what is read: the state is one position in the
global order, so shares may change and runs may resume on other hardware without losing a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpumix.data.order import Cursor
from gpumix.data.rows import Source
from gpumix.data.samples import as_source
from gpumix.hardware.runtime import indexed
from gpumix.spec.errors import InputError
from gpumix.spec.shares import Shares, share_of

Batch = dict[str, Tensor]

NO_INDICES = np.empty(0, dtype=np.int64)


class Loader(Iterator[Batch]):
    """The endless iterator over one rank's share of the global batches, in the global order.

    Batch s is positions [s*B, (s+1)*B) of the endless sequence of epochs, B the sum of `shares`;
    rank r gets its contiguous part of it, in rank order, or what a plan of several stages says.
    Batches are dictionaries
    of tensors with samples in the first dimension; a share of zero gives tensors of no rows.

        with Loader(dataset, [6, 2], rank, device="cuda:0") as loader:
            for step, batch in zip(range(1000), loader):
                ...

    One thread fetches up to `prefetch` batches ahead. It belongs to an executor, which ends it when
    the loader is closed or collected, and before the interpreter exits. An error in it is raised by
    `next()`, with the loader's place unchanged.

    Args:
        dataset: a `Source`, or any map-style dataset whose samples are dictionaries of tensors.
        shares: samples of each global batch per rank, in rank order, zeros are allowed; or a plan.
        rank: whose share to read.
        seed: of the global order; the same on every rank.
        device: where the batches will go; for a CUDA device they lie in pinned memory.
        prefetch: batches to fetch ahead of the one that is used.

    Raises:
        InputError: the shares or the dataset are unfit; see `share_of` and `SampleSource`.
    """

    def __init__(
        self,
        dataset: Source | Any,
        shares: Shares,
        rank: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        prefetch: int = 4,
    ) -> None:
        self._source = as_source(dataset)
        self._share = share_of(shares, rank)
        self._rank = rank
        if prefetch < 1:
            raise InputError(f"prefetch must be 1 or more, not {prefetch}")
        self._prefetch = prefetch
        self._pin = pin_device(device)
        self._cursor = Cursor(seed, len(self._source), self._source.fingerprint)
        self._order = self._cursor.order
        self._ahead: dict[int, Future[tuple[Batch, np.ndarray]]] = {}  # by first position
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpumix-loader")
        self.last_indices = NO_INDICES
        """The dataset's indices of the samples in the batch that was returned last, in order."""

    @property
    def global_batch(self) -> int:
        return self._share.total

    @property
    def cursor(self) -> Cursor:
        """The place of the next batch that has not been returned; the same on every rank."""
        return self._cursor

    def __next__(self) -> Batch:
        position = self._cursor.position
        self._fetch_ahead()
        # Only once the batch is there does anything change, so that an error or an interrupt while
        # waiting loses nothing.
        try:
            batch, self.last_indices = self._ahead[position].result()
        except Exception:
            self._forget_ahead()  # a disk that was away for a moment may be back
            raise
        self._cursor = self._cursor.advanced(self.global_batch)
        del self._ahead[position]
        self._fetch_ahead()
        return batch

    def indices(self, step: int) -> np.ndarray:
        """The dataset's indices of this rank's share of global batch `step`, counted from 0."""
        return self._indices(step * self.global_batch)

    def replan(self, shares: Shares) -> None:
        """Take new shares, as many ranks or not, from the next batch that has not been returned.

        All ranks must call this between the same two steps.

        Raises:
            InputError: the shares are unfit, or add up to another global batch.
        """
        share = share_of(shares, self._rank)
        if share.total != self.global_batch:
            raise InputError(
                f"the new samples per rank add up to {share.total}, not to the global batch of "
                f"{self.global_batch}"
            )
        self._forget_ahead()
        self._share = share

    def state_dict(self) -> dict[str, int | str]:
        """The place of the next batch that has not been returned; what is fetched ahead of it does
        not count. The same on every rank, so any rank's copy restores any number of them."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to the place in `state`.

        Raises:
            InputError: it belongs to another dataset, seed or version of the order.
        """
        self._cursor = self._cursor.load_state_dict(state)
        self._forget_ahead()

    def close(self) -> None:
        """Stop fetching and wait for the thread to end."""
        self._forget_ahead()
        self._thread.shutdown(wait=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _indices(self, position: int) -> np.ndarray:
        rows = self._share.rows()
        spans = [self._order.span(position + r.start, position + r.stop) for r in rows]
        return np.concatenate([NO_INDICES, *spans])

    def _fetch_ahead(self) -> None:
        """Have the next `prefetch` batches under way."""
        for k in range(self._prefetch):
            position = self._cursor.position + k * self.global_batch
            if position not in self._ahead:
                # The indices are made here, not in the thread, so that the thread holds no
                # reference to the loader: one that is dropped is collected, and its thread ends.
                indices = self._indices(position)
                job = self._thread.submit(_fetch, self._source, indices, self._pin)
                self._ahead[position] = job

    def _forget_ahead(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()


def evaluation_batches(
    held_out: Source | Any,
    shares: Shares,
    rank: int,
    *,
    batches: int,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Batch, int]]:
    """This rank's share of the first `batches` global batches of `held_out`, in file order, each
    with the number of samples of the whole.

    Never wraps: fewer samples give fewer batches, and too few for one batch give one short batch,
    cut in the same proportions (a rank's part of it may have no rows). Every rank gets the same
    number of batches.

    Raises:
        InputError: the shares are unfit, or nothing is held out.
    """
    share, source = share_of(shares, rank), as_source(held_out)
    total = min(share.total, len(source))
    if not total:
        raise InputError(
            "there are no held-out samples to evaluate on",
            fix="set data.held_out above 0, or evaluation.every_steps to 0",
        )
    own = [np.arange(rows.start, rows.stop) for rows in share.rows(total)]
    indices, pin = np.concatenate([NO_INDICES, *own]), pin_device(device)
    firsts = range(0, min(batches, len(source) // total) * total, total)
    return ((_fetch(source, first + indices, pin)[0], total) for first in firsts)


def pin_device(device: torch.device | str) -> torch.device | None:
    """The CUDA device whose copies want pinned memory; None for any other device."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    return indexed(device)  # now: the thread that pins has another current device


def _fetch(
    source: Source, indices: np.ndarray, pin: torch.device | None
) -> tuple[Batch, np.ndarray]:
    batch = source.rows(indices)
    if pin is None:
        return batch, indices
    # Pinning goes through the thread's current device; without this every rank would open a
    # context on device 0.
    with torch.cuda.device(pin):
        return {key: value.pin_memory() for key, value in batch.items()}, indices
