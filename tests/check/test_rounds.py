"""Everyone meets everyone, and nobody is in two places at once."""

from __future__ import annotations

from itertools import combinations

import pytest

from gpumix.check.probes.pair_rounds import (
    pair_all_ranks,
    pair_ring_neighbors,
    schedule_rounds,
    split_into_turns,
)


@pytest.mark.parametrize("count", range(2, 10))
def test_everybody_meets_everybody_once(count):
    found = list(pair_all_ranks(range(count)))
    met = sorted(pair for pairs in found for pair in pairs)
    assert met == list(combinations(range(count), 2))
    for pairs in found:
        there = [rank for pair in pairs for rank in pair]
        assert len(there) == len(set(there))
    assert len(found) == count - 1 + count % 2  # no fewer rounds would do


def test_one_alone_meets_nobody():
    assert list(pair_all_ranks([3])) == [] and list(schedule_rounds({"a": [0]})) == []


@pytest.mark.parametrize("count", [3, 8, 9, 16])
def test_neighbours_are_a_ring(count):
    found = list(pair_ring_neighbors(range(count)))
    met = sorted(pair for pairs in found for pair in pairs)
    assert met == sorted([(n, n + 1) for n in range(count - 1)] + [(0, count - 1)])
    for pairs in found:
        there = [rank for pair in pairs for rank in pair]
        assert len(there) == len(set(there))


def test_hosts_meet_first_then_their_devices_all_at_once():
    found = list(schedule_rounds({"a": [0, 1], "b": [2, 3], "c": [4]}))
    assert {pair for pairs in found[:3] for pair in pairs} == {(0, 2), (0, 4), (2, 4)}
    assert found[3:] == [((0, 1), (2, 3))]


def test_of_many_devices_of_a_host_only_neighbours_meet():
    assert sum(map(len, schedule_rounds({"a": range(8)}))) == 28
    assert sum(map(len, schedule_rounds({"a": range(9)}))) == 9


def test_a_host_moves_the_bytes_of_one_pair_at_a_time():
    host_of = {0: "a", 1: "a", 2: "a", 3: "a", 4: "b", 5: "b"}
    assert list(split_into_turns([(0, 1), (2, 3), (4, 5)], host_of)) == [
        ((0, 1), (4, 5)),
        ((2, 3),),
    ]
