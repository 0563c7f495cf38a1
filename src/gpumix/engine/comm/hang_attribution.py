"""Detection of blocking ranks, by begun and awaited collectives.

Ranks begin the collectives of a group in one order. So a member that has begun fewer collectives
than another rank waits for is blocking it, and may itself wait for a member of another group. Pure
functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class AwaitedCollective(NamedTuple):
    """A wait for the n-th collective of a group. Empty `members`: all ranks."""

    group: str
    number: int
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankProgress:
    """Progress of a rank: collectives begun in each group, collectives waited for, and the current
    activity in words."""

    begun: Mapping[str, int]
    waits: tuple[AwaitedCollective, ...] = ()
    activity: str = ""

    def to_text(self) -> str:
        waits = [(one.group, one.number, one.members) for one in self.waits]
        return json.dumps([dict(self.begun), waits, self.activity])

    @classmethod
    def from_text(cls, text: str) -> RankProgress:
        begun, waits, doing = json.loads(text)
        told = (
            AwaitedCollective(group, number, tuple(members)) for group, number, members in waits
        )
        return cls(begun, tuple(told), doing)


def drop_unknown(stands: Mapping[int, RankProgress | None]) -> dict[int, RankProgress]:
    """Return the known stands."""
    return {rank: stand for rank, stand in stands.items() if stand is not None}


def find_blocking_ranks(
    stands: Mapping[int, RankProgress], rank: int, wait: AwaitedCollective | None = None
) -> list[int]:
    """Return the ranks at the root of a wait of `rank`: awaited ranks that wait for nothing. In a
    cycle, the ranks that `rank` waits for directly.

    Args:
        stands: stands of the known ranks.
        wait: the wait; default: the rank's own.
    """
    waits = (wait,) if wait is not None else stands[rank].waits
    direct = _find_missing_ranks(stands, rank, waits)
    found, seen, ahead = set(), {rank}, list(direct)
    while ahead:
        one = ahead.pop()
        if one in seen:
            continue
        seen.add(one)
        further = _find_missing_ranks(stands, one, stands[one].waits)
        ahead += further
        if not further:
            found.add(one)
    return sorted(found) or direct


def _find_missing_ranks(
    stands: Mapping[int, RankProgress], rank: int, waits: Iterable[AwaitedCollective]
) -> list[int]:
    """Return the ranks that have not begun collectives awaited by `rank`."""
    return sorted(
        {
            other
            for wait in waits
            for other in wait.members or stands
            if other != rank
            and other in stands
            and stands[other].begun.get(wait.group, 0) < wait.number
        }
    )
