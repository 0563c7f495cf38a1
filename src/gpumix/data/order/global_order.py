"""Global order of samples, and the cursor of a run's position.

The item at position p of epoch e is a pure function of (seed, e, p), so every rank computes only
what it reads, and replanning or resuming elsewhere needs a single number. Numpy only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isqrt

import numpy as np

from gpumix.schema.errors import InputError

# Any change of the permutation needs a new number: cursors carry it, and a run started under
# another order must not continue under this one.
ORDER_VERSION = 1

MAX_ITEMS = 2**60
MAX_POSITION = 2**60  # beyond any run; positions in batches from there on fit int64
_ROUNDS = 8  # one blake2b digest of 64 bytes gives the keys of exactly eight rounds
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)  # finalizer of splitmix64
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class GlobalOrder:
    """A keyed permutation of [0, n) per epoch, with random access and without an array.

    An item is a pair of digits (left, right) in the mixed radix (a, b), with a and b close to the
    root of n. Each of eight Feistel rounds adds a keyed hash of one digit to the other, modulo its
    radix, which is a bijection of [0, a*b). The few results outside [0, n) (a*b - n < a) are
    permuted again until they fall inside, so the map is a bijection of [0, n). Only integer
    arithmetic modulo 2**64: equal on every platform.
    """

    n: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_ITEMS:
            raise InputError(
                f"a global order takes 1 to 2**60 samples, not {self.n}",
                code="sample-count-out-of-range",
            )

    def indices(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the items at `positions` (integers in [0, n), any shape) of `epoch`, as int64.

        Raises:
            IndexError: a position lies outside [0, n).
        """
        flat = np.asarray(positions).reshape(-1)
        if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= self.n):
            raise IndexError(f"a position lies outside [0, {self.n})")
        keys = self._round_keys(epoch)
        items = self._permute(flat.astype(np.uint64), keys)
        outside = np.flatnonzero(items >= np.uint64(self.n))
        while outside.size:
            items[outside] = self._permute(items[outside], keys)
            outside = outside[items[outside] >= np.uint64(self.n)]
        return items.astype(np.int64).reshape(np.shape(positions))

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return the items at positions [start, stop) of the endless sequence epoch 0, 1, 2, ...:
        int64.

        Position P is position P % n of epoch P // n, so a span may cross any number of epochs.
        """
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            epoch, first = divmod(start, self.n)
            count = min(self.n - first, stop - start)
            parts.append(self.indices(epoch, np.arange(first, first + count, dtype=np.int64)))
            start += count
        return np.concatenate(parts)

    def _round_keys(self, epoch: int) -> np.ndarray:
        """Return the keys of a seed and epoch: uint64[_ROUNDS]."""
        text = f"gpumix order {ORDER_VERSION} seed {self.seed} epoch {epoch}"
        digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def _permute(self, items: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Apply the bijection of [0, a*b) once: a = ceil(root of n), b = ceil(n / a)."""
        a = isqrt(self.n - 1) + 1
        b = -(-self.n // a)
        left, right = np.divmod(items, np.uint64(b))
        for r in range(0, _ROUNDS, 2):
            left = _add_hash(left, right, keys[r], np.uint64(a))
            right = _add_hash(right, left, keys[r + 1], np.uint64(b))
        return left * np.uint64(b) + right


def _add_hash(digit: np.ndarray, other: np.ndarray, key: np.uint64, radix: np.uint64) -> np.ndarray:
    """Return (digit + hash(other, key)) modulo `radix`, at most 2**31; uint64 throughout."""
    x = other + key
    x ^= x >> np.uint64(30)
    x *= _MIX_1
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x >>= np.uint64(32)  # the top half, then scaled into [0, radix) without a division
    x *= radix
    x >>= np.uint64(32)
    x += digit
    wrapped: np.ndarray = np.minimum(x, x - radix)  # x < 2 * radix; below radix it wraps to huge
    return wrapped


@dataclass(frozen=True)
class Cursor:
    """A run's position in the global order of one dataset: equal on every rank, in any plan.

    `position` is the first position not yet in a returned batch; `fingerprint` names the dataset's
    content, `n` its number of samples.
    """

    seed: int
    n: int
    fingerprint: str
    position: int = 0
    order_version: int = ORDER_VERSION

    @property
    def order(self) -> GlobalOrder:
        return GlobalOrder(self.n, self.seed)

    @property
    def epoch(self) -> int:
        return self.position // self.n

    def advanced(self, count: int) -> Cursor:
        return replace(self, position=self.position + count)

    def state_dict(self) -> dict[str, int | str]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, object]) -> Cursor:
        """Return the cursor moved to the position in `state`.

        Raises:
            InputError: `state` is no cursor, or belongs to another dataset, seed or order.
        """
        position = _check_position(state)
        differing = [
            f"{field.name} is {state[field.name]!r} in the checkpoint and "
            f"{getattr(self, field.name)!r} here"
            for field in fields(self)
            if field.name != "position" and state[field.name] != getattr(self, field.name)
        ]
        if differing:
            raise InputError(
                "the checkpoint's place in the data does not belong to this data",
                code="data-cursor-of-other-data",
                where="data cursor",
                why="; ".join(differing),
                fix="resume with the data, seed, sequence_length and data.validation_split of the "
                "first run, or start a new run",
            )
        return replace(self, position=position)


def _check_position(state: Mapping[str, object]) -> int:
    """Return the position in `state`, after a check of all fields and types of a cursor."""
    for field in fields(Cursor):
        kind = str if field.name == "fingerprint" else int
        value = state.get(field.name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(
                f"this is no data cursor: '{field.name}' is {value!r}",
                code="data-cursor-invalid",
                where="data cursor",
            )
    position = state["position"]
    if not isinstance(position, int) or not 0 <= position <= MAX_POSITION:
        raise InputError(
            f"this is no data cursor: 'position' is {position!r}",
            code="data-cursor-invalid",
            where="data cursor",
        )
    return position
