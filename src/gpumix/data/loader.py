"""Feeds one rank: its share of every global batch, fetched ahead in one background thread.

The plan's shares decide who reads what, never what is read: the state is one position in the
global order, so shares may change and runs may resume on other hardware without losing a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpumix.data.order import Cursor
from gpumix.data.rows import Source
from gpumix.data.samples import as_source
from gpumix.data.shares import check_shares, share, short_share
from gpumix.hardware.runtime import indexed
from gpumix.spec.errors import InputError

Batch = dict[str, Tensor]


class Loader(Iterator[Batch]):
    """The endless iterator over one rank's share of the global batches, in the global order.

    Batch s is positions [s*B, (s+1)*B) of the endless sequence of epochs, B the sum of
    `worker_samples`; rank r gets its contiguous part of it, in rank order. Batches are dictionaries
    of tensors with samples in the first dimension; a share of zero gives tensors of no rows.

        with Loader(dataset, [6, 2], rank, device="cuda:0") as loader:
            for step, batch in zip(range(1000), loader):
                ...

    One thread fetches up to `prefetch` batches ahead. It belongs to an executor, which ends it when
    the loader is closed or collected, and before the interpreter exits. An error in it is raised by
    `next()`, with the loader's place unchanged.

    Args:
        dataset: a `Source`, or any map-style dataset whose samples are dictionaries of tensors.
        worker_samples: samples of each global batch per rank, in rank order; zeros are allowed.
        rank: whose share to read.
        seed: of the global order; the same on every rank.
        device: where the batches will go; for a CUDA device they lie in pinned memory.
        prefetch: batches to fetch ahead of the one that is used.

    Raises:
        InputError: the shares or the dataset are unfit; see `check_shares` and `SampleSource`.
    """

    def __init__(
        self,
        dataset: Source | Any,
        worker_samples: Sequence[int],
        rank: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        prefetch: int = 4,
    ) -> None:
        self._source = as_source(dataset)
        self._shares = check_shares(worker_samples, rank)
        self._rank = rank
        if prefetch < 1:
            raise InputError(f"prefetch must be 1 or more, not {prefetch}")
        self._prefetch = prefetch
        self._pin = pin_device(device)
        self._cursor = Cursor(seed, len(self._source), self._source.fingerprint)
        self._order = self._cursor.order
        self._ahead: dict[int, Future[tuple[Batch, np.ndarray]]] = {}  # by first position
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpumix-loader")
        self.last_indices = np.empty(0, dtype=np.int64)
        """The dataset's indices of the samples in the batch that was returned last, in order."""

    @property
    def global_batch(self) -> int:
        return sum(self._shares)

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

    def replan(self, worker_samples: Sequence[int]) -> None:
        """Take new shares, as many ranks or not, from the next batch that has not been returned.

        All ranks must call this between the same two steps.

        Raises:
            InputError: the shares are unfit, or add up to another global batch.
        """
        shares = check_shares(worker_samples, self._rank)
        if sum(shares) != self.global_batch:
            raise InputError(
                f"the new samples per rank add up to {sum(shares)}, not to the global batch of "
                f"{self.global_batch}"
            )
        self._forget_ahead()
        self._shares = shares

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
        start, stop = share(self._shares, self._rank)
        return self._order.span(position + start, position + stop)

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
    worker_samples: Sequence[int],
    rank: int,
    *,
    batches: int,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """This rank's share of the first `batches` global batches of `held_out`, in file order.

    Never wraps: fewer samples give fewer batches, and too few for one batch give one short batch,
    cut in the same proportions (a rank's part of it may have no rows). Every rank gets the same
    number of batches.

    Raises:
        InputError: the shares are unfit, or nothing is held out.
    """
    shares = check_shares(worker_samples, rank)
    source = as_source(held_out)
    total, n = sum(shares), len(source)
    if not n:
        raise InputError(
            "there are no held-out samples to evaluate on",
            fix="set data.held_out above 0, or evaluation.every_steps to 0",
        )
    start, stop = share(shares, rank) if n >= total else short_share(shares, rank, n)
    pin = pin_device(device)
    firsts = range(0, min(batches, n // total) * total, total) if n >= total else range(1)
    return (_fetch(source, np.arange(k + start, k + stop), pin)[0] for k in firsts)


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
