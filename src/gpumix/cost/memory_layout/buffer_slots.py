"""Memory slots shared by buffers that are never in use simultaneously.

The engine lays out its gathered units and gradient buffers once, before the first step, so that a
step allocates nothing; the memory model counts the layout. Both use this module.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

# Rows of each rank in which gradients arrive in turn in memory of the host.
GRADIENT_ROOMS = 2
ALIGNMENT = 512  # bytes, the alignment of CUDA's allocator

# Closed intervals of integers.
Intervals = tuple[tuple[int, int], ...]
ALWAYS: Intervals = ((-(2**60), 2**60),)


def align_size(size: int) -> int:
    """Round `size` in bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Buffer:
    """Memory in use at some times."""

    bytes: int
    times: Intervals


@dataclass(frozen=True)
class Slots:
    """Slot of each buffer, and the bytes of each slot."""

    of_buffer: tuple[int, ...]
    bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes)


def share_slots(buffers: Sequence[Buffer]) -> Slots:
    """Assign buffers to slots without overlaps in time.

    Two greedy orders are tried, and the one using less memory is returned: by the beginning of use,
    needing the fewest slots for intervals, and by size, wasting the least within a slot.
    """
    numbers = range(len(buffers))
    by_time = sorted(numbers, key=lambda n: min(buffers[n].times, default=(0, 0)))
    by_size = sorted(by_time, key=lambda n: -buffers[n].bytes)
    return min((_assign_in_order(buffers, by_time), _assign_in_order(buffers, by_size)), key=_size)


def _size(slots: Slots) -> int:
    return slots.total_bytes


def _assign_in_order(buffers: Sequence[Buffer], order: Sequence[int]) -> Slots:
    held: list[_Slot] = []
    slot_of = [0] * len(buffers)
    for number in order:
        buffer = buffers[number]
        slot = next((s for s, used in enumerate(held) if used.free(buffer)), len(held))
        if slot == len(held):
            held.append(_Slot())
        held[slot].take(buffer)
        slot_of[number] = slot
    return Slots(tuple(slot_of), tuple(slot.bytes for slot in held))


class _Slot:
    """Slot and the times of use by non-overlapping buffers."""

    def __init__(self) -> None:
        self.bytes = 0
        self._times: list[tuple[int, int]] = []  # sorted

    def free(self, buffer: Buffer) -> bool:
        """Check if the slot is unused while `buffer` is in use."""
        for begin, end in buffer.times:
            after = bisect_left(self._times, (begin, begin))
            if after < len(self._times) and self._times[after][0] <= end:
                return False
            if after and self._times[after - 1][1] >= begin:
                return False
        return True

    def take(self, buffer: Buffer) -> None:
        self.bytes = max(self.bytes, buffer.bytes)
        for time in buffer.times:
            insort(self._times, time)


# -- the engine's buffers --------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketLifetimes:
    """Times of use of a bucket: of gathered parameters (ZeRO stage 3), and of the gradient buffer
    (stages 2 and 3)."""

    gathered: Intervals
    gradient: Intervals


def compute_bucket_lifetimes(sequence: Sequence[int], count: int) -> list[BucketLifetimes]:
    """Return the times of use of `count` unit buckets.

    In the forward pass the time is the place in `sequence`. While one bucket is computed, the next
    is gathered; in the backward pass the previous. The last stays between the passes. For
    gradients, time 0 is the head, time t the backward of the t-th last place. A bucket is reduced
    after the first of its calls, while the next is differentiated, and one reduction ends before
    another begins.

    Args:
        sequence: numbers of the buckets in forward order, with no number twice in a row.
    """
    last = len(sequence) - 1
    gathered: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for place, number in enumerate(sequence):
        gathered[number].append((place - 1, place + (place == last)))
    begun: dict[int, int] = {}
    done: dict[int, int] = {}
    for time, number in enumerate(reversed(sequence), start=1):
        begun.setdefault(number, time)
        done[number] = time
    ends = sorted(done.values())
    following = dict(zip(ends, [*ends[1:], len(sequence) + 1]))
    return [
        BucketLifetimes(tuple(gathered[n]), ((begun[n], following[done[n]]),)) for n in range(count)
    ]


def compute_root_end_lifetimes(sequence: Sequence[int]) -> tuple[BucketLifetimes, BucketLifetimes]:
    """Return the times of use of root parameters used only before the first unit, and only after
    the last. The gradient of the former is in use throughout."""
    last = len(sequence)
    first_done = min(last - place for place in _first_places(sequence))
    before = BucketLifetimes(gathered=((-1, -1),), gradient=((0, last + 1),))
    after = BucketLifetimes(gathered=((last - 1, last),), gradient=((0, first_done),))
    return before, after


def _first_places(sequence: Sequence[int]) -> set[int]:
    return {sequence.index(number) for number in set(sequence)}
