"""The order in which pairs of ranks are tried: in a round each rank is in one at most. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

Pair = tuple[int, int]
MOST_OF_ALL = 8  # devices of a host of which all pairs are tried; of more, neighbours


def rounds(ranks_by_host: Mapping[str, Sequence[int]]) -> Iterator[tuple[Pair, ...]]:
    """Pairs of hosts first, by their first ranks; then pairs inside all hosts at once."""
    firsts = [ranks[0] for ranks in ranks_by_host.values()]
    yield from everybody(firsts)
    inside = [
        list(everybody(ranks) if len(ranks) <= MOST_OF_ALL else neighbours(ranks))
        for ranks in ranks_by_host.values()
    ]
    for parts in zip_longest(*inside, fillvalue=()):
        yield tuple(pair for part in parts for pair in part)


def everybody(ranks: Sequence[int]) -> Iterator[tuple[Pair, ...]]:
    """Everyone meets everyone once: one stays, the others move on by a place each round."""
    if len(ranks) < 2:
        return
    there: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    for _ in range(len(there) - 1):
        meet = zip(there, reversed(there[len(there) // 2 :]))
        yield tuple((a, b) if a < b else (b, a) for a, b in meet if a is not None and b is not None)
        there = [there[0], there[-1], *there[1:-1]]


def neighbours(ranks: Sequence[int]) -> Iterator[tuple[Pair, ...]]:
    """Everyone meets the next one, the last one the first."""
    links = list(zip(ranks, [*ranks[1:], ranks[0]]))
    closing = links[-1:] if len(ranks) % 2 else []
    for some in (links[0 : len(links) - len(closing) : 2], links[1::2], closing):
        if some:
            yield tuple((min(pair), max(pair)) for pair in some)


def turns(pairs: Sequence[Pair], host_of: Mapping[int, str]) -> Iterator[tuple[Pair, ...]]:
    """The pairs of a round, so that no host is in two at once: what they move would share it."""
    left = list(pairs)
    while left:
        busy: set[str] = set()
        now = []
        for pair in left:
            hosts = {host_of[rank] for rank in pair}
            if not hosts & busy:
                busy |= hosts
                now.append(pair)
        yield tuple(now)
        left = [pair for pair in left if pair not in now]
