"""What samples draw at random: by their places in the order, never by who reads them.

Each place of the order has a seed. Who reads rows says which seeds they have; who calls a dataset
says which of the rows it is for. In a process that does nothing but read, the generators of
`random`, numpy and torch are seeded then. Where others draw from these too, in a thread of the
process that trains, only `sample_generator` is, unless they wait and the generators are put back.
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
_STEP = 0x9E3779B97F4A7C15  # of splitmix64, whose finaliser the others belong to
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TOGETHER = 1  # what a batch is made with, beside what its samples are
_MERSENNE_BYTES = 4 * 624 + 4  # words and a place among them
_PATIENCE_S = 30.0  # with another one that has the generators, who may wait for this one


class _Own(threading.local):
    """Of one thread.

    Attributes:
        seeds: of the rows that it reads; None while it reads none.
        everywhere: whether the generators of the process are to be seeded.
        seed: that `generator` has not got yet.
        asked: whether anybody had that generator.
        has_them: whether it waits while others move the generators of the process.
    """

    def __init__(self) -> None:
        self.seeds: Sequence[int] | None = None
        self.everywhere = False
        self.seed: int | None = None
        self.generator: torch.Generator | None = None
        self.asked = False
        self.has_them = False


class _Turn:
    """Of one thread with the generators of the process, which are put back at its end."""

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
    """One thread after the other has the generators of the process."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._change = threading.Lock()
        self._now: _Turn | None = None

    def begin(self) -> _Turn:
        got = self._free.acquire(timeout=_PATIENCE_S)
        turn = _Turn()
        if got:
            self._now = turn
        return turn

    def end(self, turn: _Turn) -> None:
        with self._change:
            if turn.over:
                return
            turn.over = True
            turn.put_back()
            if self._now is turn:
                self._now = None
                self._free.release()

    def end_of(self, thread: threading.Thread) -> None:
        turn = self._now
        if turn is not None and turn.thread is thread:
            self.end(turn)


_own = _Own()
_turns = _Turns()


def _in_a_child() -> None:
    """A thread that had the generators when this process was forked is not here."""
    global _turns
    _turns = _Turns()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)


def sample_generator() -> torch.Generator:
    """What a dataset, a transform or a `collate` draws from: a generator that is seeded by the
    sample's place in the order, so that it draws the same numbers whoever reads it, in a thread or
    in a process, after a resume and under any plan.

    For other libraries its `initial_seed()` is a seed: `numpy.random.default_rng(...)`. Where no
    loader reads it is torch's default generator.
    """
    if _own.seeds is None:
        return torch.default_generator
    if _own.generator is None:
        _own.generator = torch.Generator()
    if _own.seed is not None:
        # Else it would draw what torch's default generator does.
        _own.generator.manual_seed(_own.seed ^ _STEP)
        _own.seed = None
    _own.asked = True
    return _own.generator


def key_of(what: str) -> int:
    """Of all seeds that belong together."""
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little")


def seeds_of(key: int, positions: np.ndarray) -> np.ndarray:
    """One for each of these places: uint64."""
    x = positions.astype(np.uint64) * np.uint64(_STEP) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    seeds: np.ndarray = x ^ (x >> np.uint64(31))
    return seeds


def mixed(seed: int, other: int) -> int:
    """A seed of its own for a part of what `seed` is for: as `seeds_of`."""
    x = (other * _STEP + seed) & _BITS_64
    x = (x ^ (x >> 30)) * _MIX_1 & _BITS_64
    x = (x ^ (x >> 27)) * _MIX_2 & _BITS_64
    return x ^ (x >> 31)


# -- who reads -------------------------------------------------------------------------------------


@contextmanager
def reading(seeds: Sequence[int], *, everywhere: bool) -> Iterator[None]:
    """This thread reads rows with these seeds.

    Args:
        everywhere: also the generators of the process are seeded: nobody else draws from them now.
    """
    before = _own.seeds, _own.everywhere
    # Where no row is wanted, a sample may be read to tell what rows would be like.
    _own.seeds, _own.everywhere = seeds or [0], everywhere
    try:
        yield
    finally:
        _own.seeds, _own.everywhere = before
        _own.seed = None


@contextmanager
def put_back() -> Iterator[None]:
    """Afterwards the generators of the process are as they were. Other threads that would have them
    put back wait meanwhile; not those that read rows, for which somebody waits."""
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


def leave_behind(thread: threading.Thread) -> None:
    """A thread that is stuck has the generators of the process no longer; they are as they were."""
    _turns.end_of(thread)


@contextmanager
def put_back_if_moved() -> Iterator[Drawn]:
    """This thread waits meanwhile, so what moves the generators of the process is a dataset that
    others read. Afterwards they are as they were, and it is told whether they had moved."""
    drawn = Drawn()
    with put_back():
        before = _states()
        yield drawn
        drawn.of_process = before != _states()


def forget() -> None:
    """What generators of the process keep of numbers that were drawn: the next is not one of these,
    which would look as if none had been drawn."""
    with reading([0], everywhere=True):
        begin(0)


@contextmanager
def only(row: int) -> Iterator[None]:
    """Of the rows that are read, this one is read by itself."""
    with parts([row]):
        yield


@contextmanager
def parts(rows: Sequence[int]) -> Iterator[None]:
    """Of the rows that are read, parts are read one behind the other: to which rows they belong. A
    row that is one part draws as ever."""
    whole = _own.seeds
    if whole is None:
        yield
        return
    own, before, number = [], -1, 0
    for row in rows:
        number = number + 1 if row == before else 0
        own.append(mixed(whole[row], number) if number else whole[row])
        before = row
    with reading(own, everywhere=_own.everywhere):
        yield


# -- what is read ----------------------------------------------------------------------------------


def begin(row: int) -> None:
    """What is drawn from here on belongs to this row."""
    if _own.seeds is not None:
        begin_with(_own.seeds[row])


def begin_together() -> None:
    """What is drawn from here on belongs to all the rows: it goes by the first of them."""
    if _own.seeds is not None and len(_own.seeds):
        begin_with(mixed(_own.seeds[0], _TOGETHER))


def begin_with(seed: int) -> None:
    """What is drawn from here on goes by this seed, if this thread reads rows."""
    if _own.seeds is None:
        return
    _own.seed = seed
    if _own.everywhere:
        random.seed(seed)
        # These two take 32 bits, and would draw the same numbers by the same ones.
        np.random.seed(seed >> 32)
        torch.default_generator.manual_seed(seed)


@dataclass
class Drawn:
    """What was drawn from: the generators of the process, where that can be told, or that of the
    sample."""

    of_process: bool = False
    of_sample: bool = False

    def __bool__(self) -> bool:
        return self.of_process or self.of_sample


@contextmanager
def watched() -> Iterator[Drawn]:
    """Tells, afterwards, what was drawn from in between."""
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
    """`numpy.random.get_state` takes longer than a small sample."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(bits, np.random.MT19937):
        return repr(np.random.get_state(legacy=False))
    return ctypes.string_at(bits.ctypes.state_address, _MERSENNE_BYTES)
