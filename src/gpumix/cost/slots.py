"""Which buffers may lie in the same memory, because they are never in use at the same time.

The engine lays its gathered units and its gradient buffers out once, before the first step, so that
a step allocates nothing; the memory model counts what it lays out. Both ask here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 512  # bytes, as CUDA's allocator aligns what it gives out

# Closed intervals of whole numbers.
Times = tuple[tuple[int, int], ...]
ALWAYS: Times = ((-(2**60), 2**60),)


def aligned(size: int) -> int:
    """`size` in bytes, rounded up so that what lies behind it is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Buffer:
    """Memory that is in use at some times."""

    bytes: int
    times: Times


@dataclass(frozen=True)
class Slots:
    """Of each buffer, the slot that it lies in; and the bytes of each slot."""

    of_buffer: tuple[int, ...]
    bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes)


def share_slots(buffers: Sequence[Buffer]) -> Slots:
    """Put buffers into slots, none together with one that it meets.

    Of two greedy orders the one that takes less memory: by the beginning of use, which needs the
    fewest slots for intervals, and by size, which wastes the least within a slot.
    """
    numbers = range(len(buffers))
    by_time = sorted(numbers, key=lambda n: min(buffers[n].times, default=(0, 0)))
    by_size = sorted(by_time, key=lambda n: -buffers[n].bytes)
    return min((_in_order(buffers, by_time), _in_order(buffers, by_size)), key=_size)


def _size(slots: Slots) -> int:
    return slots.total_bytes


def _in_order(buffers: Sequence[Buffer], order: Sequence[int]) -> Slots:
    held: list[_Held] = []
    slot_of = [0] * len(buffers)
    for number in order:
        buffer = buffers[number]
        slot = next((s for s, used in enumerate(held) if used.free(buffer)), len(held))
        if slot == len(held):
            held.append(_Held())
        held[slot].take(buffer)
        slot_of[number] = slot
    return Slots(tuple(slot_of), tuple(slot.bytes for slot in held))


class _Held:
    """A slot: when it is in use, by buffers none of which meets another."""

    def __init__(self) -> None:
        self.bytes = 0
        self._times: list[tuple[int, int]] = []  # sorted

    def free(self, buffer: Buffer) -> bool:
        """Whether nobody uses the slot while `buffer` is in use."""
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
class BucketUses:
    """When a step uses a bucket: when it is gathered (ZeRO stage 3), and when its gradient buffer
    is in use (stages 2 and 3)."""

    gathered: Times
    gradient: Times


def bucket_uses(sequence: Sequence[int], count: int) -> list[BucketUses]:
    """The times of `count` buckets that hold the units.

    In the forward pass the time is the place in `sequence`; while one bucket is computed the next
    is gathered, in the backward pass the one before. The last stays between the passes. Of
    gradients, time 0 is the head, time t the backward of the t-th last place; a bucket is reduced
    after the first of its calls, while the next one is differentiated, and one reduction ends
    before another begins.

    Args:
        sequence: numbers of the buckets in the order in which the forward pass uses them, none
            twice in a row.
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
    return [BucketUses(tuple(gathered[n]), ((begun[n], following[done[n]]),)) for n in range(count)]


def end_uses(sequence: Sequence[int]) -> tuple[BucketUses, BucketUses]:
    """The same of what the root unit has beside: what is used before the first unit only, and after
    the last one only. The gradient of the former is in use throughout."""
    last = len(sequence)
    first_done = min(last - place for place in _first_places(sequence))
    before = BucketUses(gathered=((-1, -1),), gradient=((0, last + 1),))
    after = BucketUses(gathered=((last - 1, last),), gradient=((0, first_done),))
    return before, after


def _first_places(sequence: Sequence[int]) -> set[int]:
    return {sequence.index(number) for number in set(sequence)}
