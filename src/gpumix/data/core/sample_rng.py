"""Random draws of samples: determined by position in the order, never by the reader.

Each position has a seed. Readers declare the seeds of their rows; callers of a dataset declare the
current row. In a process that only reads, the generators of `random`, numpy and torch are seeded.
In a thread of the training process, where others draw from them too, only `sample_generator` is
seeded, unless the others wait and the generators are restored.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

_BITS_64 = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # of splitmix64, as are the multipliers of its finalizer
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TOGETHER = 1  # number of the seed with which a batch is collated
_MERSENNE_BYTES = 4 * 624 + 4  # 624 words and an index
_PATIENCE_S = 30.0  # limit to avoid deadlock with the current owner


class _ThreadState(threading.local):
    """State of one thread.

    Attributes:
        seeds: seeds of the rows being read; None while none are.
        everywhere: whether to seed the generators of the process.
        seed: next seed of `generator`, not applied yet.
        asked: whether the generator was requested.
        has_them: whether this thread owns the generators of the process, see `preserve_rng_state`.
    """

    def __init__(self) -> None:
        self.seeds: Sequence[int] | None = None
        self.everywhere = False
        self.seed: int | None = None
        self.generator: torch.Generator | None = None
        self.asked = False
        self.has_them = False


class _Turn:
    """A thread's turn with the generators of the process, which are restored at its end."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.over = False
        self._states = (
            random.getstate(),
            np.random.get_state(legacy=False),
            torch.default_generator.get_state(),
        )

    def put_back(self) -> None:
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        torch.default_generator.set_state(self._states[2])


class _Turns:
    """The queue for the generators of the process: one thread at a time."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._change = threading.Lock()
        self.now: _Turn | None = None

    def begin(self) -> _Turn:
        got = self._free.acquire(timeout=_PATIENCE_S)
        turn = _Turn()
        if got:
            self.now = turn
        return turn

    def end(self, turn: _Turn) -> None:
        with self._change:
            if turn.over:
                return
            turn.over = True
            turn.put_back()
            if self.now is turn:
                self.now = None
                self._free.release()


_own = _ThreadState()
_turns = _Turns()


def _in_a_child() -> None:
    """Reset the turns after a fork: threads that owned the generators do not exist here."""
    global _turns
    _turns = _Turns()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)


def sample_generator() -> torch.Generator:
    """Return the generator for random draws in a dataset, a transform or a `collate`.

    It is seeded by the sample's position in the order, so a sample draws the same numbers in any
    thread or process, after a resume and under any plan. Other libraries can use its
    `initial_seed()`: `numpy.random.default_rng(...)`. Outside of loaders it is torch's default
    generator.
    """
    if _own.seeds is None:
        return torch.default_generator
    if _own.generator is None:
        _own.generator = torch.Generator()
    if _own.seed is not None:
        # Otherwise it would draw the same numbers as torch's default generator.
        _own.generator.manual_seed(_own.seed ^ _STEP)
        _own.seed = None
    _own.asked = True
    return _own.generator


def derive_key(what: str) -> int:
    """Return a key shared by all seeds of one purpose."""
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little")


def derive_seeds(key: int, positions: np.ndarray) -> np.ndarray:
    """Return a seed for each position: uint64."""
    x = positions.astype(np.uint64) * np.uint64(_STEP) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    seeds: np.ndarray = x ^ (x >> np.uint64(31))
    return seeds


def derive_seed(seed: int, other: int) -> int:
    """Derive from `seed` the seed of part `other`, hashed as in `derive_seeds`."""
    x = (other * _STEP + seed) & _BITS_64
    x = (x ^ (x >> 30)) * _MIX_1 & _BITS_64
    x = (x ^ (x >> 27)) * _MIX_2 & _BITS_64
    return x ^ (x >> 31)


# -- readers ---------------------------------------------------------------------------------------


@contextmanager
def use_row_seeds(seeds: Sequence[int], *, everywhere: bool) -> Iterator[None]:
    """Read rows with `seeds` in the current thread, within the block.

    Args:
        everywhere: whether to seed the generators of the process, too; nobody else may use them.
    """
    before = _own.seeds, _own.everywhere
    # With no rows requested, a sample may still be read for its shapes and dtypes.
    _own.seeds, _own.everywhere = seeds or [0], everywhere
    try:
        yield
    finally:
        _own.seeds, _own.everywhere = before
        _own.seed = None


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the generators of the process after the block. Concurrent calls wait their turn,
    except in threads that read rows, for which a caller waits already."""
    if _own.has_them or _own.seeds is not None:
        inner = _Turn()
        try:
            yield
        finally:
            inner.put_back()
        return
    turn = _turns.begin()
    _own.has_them = True
    try:
        yield
    finally:
        _own.has_them = False
        _turns.end(turn)


def end_turn_of_thread(thread: threading.Thread) -> None:
    """End a stuck thread's turn with the generators of the process, and restore them."""
    turn = _turns.now
    if turn is not None and turn.thread is thread:
        _turns.end(turn)


@contextmanager
def preserve_and_watch_rng() -> Iterator[Drawn]:
    """Restore the generators of the process after the block, and report any movement. The calling
    thread waits within the block, so only a dataset read by other threads can move them."""
    drawn = Drawn()
    with preserve_rng_state():
        before = _states()
        yield drawn
        drawn.of_process = before != _states()


def clear_cached_draws() -> None:
    """Clear numbers cached by the generators of the process. Drawing a cached number would look as
    if none had been drawn."""
    with use_row_seeds([0], everywhere=True):
        seed_row(0)


@contextmanager
def use_part_seeds(rows: Sequence[int]) -> Iterator[None]:
    """Read several parts per row in sequence; `rows` has the row of each part. The first part of a
    row draws as the row itself does."""
    whole = _own.seeds
    if whole is None:
        yield
        return
    own, before, number = [], -1, 0
    for row in rows:
        number = number + 1 if row == before else 0
        own.append(derive_seed(whole[row], number) if number else whole[row])
        before = row
    with use_row_seeds(own, everywhere=_own.everywhere):
        yield


# -- samples ---------------------------------------------------------------------------------------


def seed_row(row: int) -> None:
    """Draw for `row` from here on."""
    if _own.seeds is not None:
        seed_draws(_own.seeds[row])


def seed_collate() -> None:
    """Draw for all rows from here on, seeded by the first row."""
    if _own.seeds is not None and len(_own.seeds):
        seed_draws(derive_seed(_own.seeds[0], _TOGETHER))


def seed_draws(seed: int) -> None:
    """Draw from `seed` from here on, if this thread reads rows."""
    if _own.seeds is None:
        return
    _own.seed = seed
    if _own.everywhere:
        random.seed(seed)
        # Both use 32 bits, and with equal bits both would draw equal numbers.
        np.random.seed(seed >> 32)
        torch.default_generator.manual_seed(seed)


@dataclass
class Drawn:
    """Generators used: of the process, where observable, or of the sample."""

    of_process: bool = False
    of_sample: bool = False

    def __bool__(self) -> bool:
        return self.of_process or self.of_sample


@contextmanager
def watch_draws() -> Iterator[Drawn]:
    """Report, after the block, which generators were used within."""
    drawn = Drawn()
    before = _states() if _own.everywhere else None
    _own.asked = False
    yield drawn
    drawn.of_sample = _own.asked
    drawn.of_process = before is not None and before != _states()


def _states() -> tuple[object, ...]:
    return (
        random.getstate(),
        _state_of_numpy(),
        torch.default_generator.get_state().numpy().tobytes(),
    )


def _state_of_numpy() -> object:
    """Return the state of numpy's global generator: `numpy.random.get_state` takes longer than a
    small sample."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(bits, np.random.MT19937):
        return repr(np.random.get_state(legacy=False))
    return ctypes.string_at(bits.ctypes.state_address, _MERSENNE_BYTES)
