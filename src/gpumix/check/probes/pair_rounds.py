"""Order of testing pairs of ranks, in rounds with at most one pair per rank. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

Pair = tuple[int, int]
ALL_PAIRS_MOST_DEVICES = (
    8  # devices of a host up to which all pairs are tested; beyond, only neighbours
)


def schedule_rounds(ranks_by_host: Mapping[str, Sequence[int]]) -> Iterator[tuple[Pair, ...]]:
    """Yield rounds of pairs between hosts, by first ranks, then of pairs inside all hosts."""
    firsts = [ranks[0] for ranks in ranks_by_host.values()]
    yield from pair_all_ranks(firsts)
    inside = [
        list(
            pair_all_ranks(ranks)
            if len(ranks) <= ALL_PAIRS_MOST_DEVICES
            else pair_ring_neighbors(ranks)
        )
        for ranks in ranks_by_host.values()
    ]
    for parts in zip_longest(*inside, fillvalue=()):
        yield tuple(pair for part in parts for pair in part)


def pair_all_ranks(ranks: Sequence[int]) -> Iterator[tuple[Pair, ...]]:
    """Yield a round-robin schedule over all pairs: the first rank stays, the rest rotate."""
    if len(ranks) < 2:
        return
    there: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    for _ in range(len(there) - 1):
        meet = zip(there, reversed(there[len(there) // 2 :]))
        yield tuple((a, b) if a < b else (b, a) for a, b in meet if a is not None and b is not None)
        there = [there[0], there[-1], *there[1:-1]]


def pair_ring_neighbors(ranks: Sequence[int]) -> Iterator[tuple[Pair, ...]]:
    """Yield rounds of neighbouring pairs on a ring."""
    links = list(zip(ranks, [*ranks[1:], ranks[0]]))
    closing = links[-1:] if len(ranks) % 2 else []
    for some in (links[0 : len(links) - len(closing) : 2], links[1::2], closing):
        if some:
            yield tuple((min(pair), max(pair)) for pair in some)


def split_into_turns(
    pairs: Sequence[Pair], host_of: Mapping[int, str]
) -> Iterator[tuple[Pair, ...]]:
    """Split a round into turns with one pair per host at most, as pairs share bandwidth."""
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
