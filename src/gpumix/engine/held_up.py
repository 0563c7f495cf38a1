"""Who holds up the others: by what each rank has begun, and what it waits for.

Ranks begin the collectives of a group in one order. So a member that has begun fewer of them than
another waits for is waited for; it may wait itself, for the member of another group. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """For the n-th collective of a group, whose members are all ranks unless they are told."""

    group: str
    number: int
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stand:
    """How far a rank has come: how many collectives of each group it has begun, which it waits for,
    and what it is doing, in words."""

    begun: Mapping[str, int]
    waits: tuple[Wait, ...] = ()
    doing: str = ""

    def to_text(self) -> str:
        waits = [(one.group, one.number, one.members) for one in self.waits]
        return json.dumps([dict(self.begun), waits, self.doing])

    @classmethod
    def from_text(cls, text: str) -> Stand:
        begun, waits, doing = json.loads(text)
        told = (Wait(group, number, tuple(members)) for group, number, members in waits)
        return cls(begun, tuple(told), doing)


def known(stands: Mapping[int, Stand | None]) -> dict[int, Stand]:
    """Those that are told."""
    return {rank: stand for rank, stand in stands.items() if stand is not None}


def held_up_by(stands: Mapping[int, Stand], rank: int, wait: Wait | None = None) -> list[int]:
    """Who holds up `rank` in the end: those who are waited for and wait for nobody. Where all wait
    for each other, those whom `rank` waits for.

    Args:
        stands: of the ranks that are known.
        wait: for this; default: what it says itself.
    """
    waits = (wait,) if wait is not None else stands[rank].waits
    direct = _missing(stands, rank, waits)
    found, seen, ahead = set(), {rank}, list(direct)
    while ahead:
        one = ahead.pop()
        if one in seen:
            continue
        seen.add(one)
        further = _missing(stands, one, stands[one].waits)
        ahead += further
        if not further:
            found.add(one)
    return sorted(found) or direct


def _missing(stands: Mapping[int, Stand], rank: int, waits: Iterable[Wait]) -> list[int]:
    """Who has not begun what `rank` waits for."""
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
