"""Collectives over stated links, by hand: rings, and the trees of an all-reduce between hosts."""

from __future__ import annotations

import pytest

from gpumix.cost.network.link_times import TREE_PIECE_BYTES, StatedLinks, count_devices_by_host
from gpumix.schema.cluster.network import Link, Network

LATENCY_S, RATE = 1e-4, 1e9
MIB = 2**20


def between(hosts: int) -> StatedLinks:
    """One device on each host, all linked alike."""
    places = [(f"h{i:03d}", "c") for i in range(hosts)]
    return StatedLinks.of(
        Network(between=Link.stated(RATE, LATENCY_S)), count_devices_by_host(places)
    )


def message_s(size: float) -> float:
    return LATENCY_S + size / RATE


def test_a_ring_moves_a_buffer_in_parts():
    found = between(4).seconds("gather", "native", "all", 64 * MIB)
    assert found == pytest.approx(3 * message_s(16 * MIB))


def test_few_hosts_reduce_large_buffers_in_a_ring():
    found = between(4).seconds("reduce", "native", "across", 64 * MIB)
    assert found == pytest.approx(2 * 3 * message_s(16 * MIB))


def test_many_hosts_reduce_between_them_by_trees():
    """To the root and back: the buffer once over each link, and its first piece up 7 levels."""
    found = between(100).seconds("reduce", "native", "across", 8 * MIB)
    assert found == pytest.approx(2 * (message_s(8 * MIB) + 7 * message_s(TREE_PIECE_BYTES)))
    assert found < 2 * 99 * message_s(8 * MIB / 100)


def test_a_small_buffer_is_one_piece():
    found = between(64).seconds("reduce", "native", "across", 1000)
    assert found == pytest.approx(2 * (1 + 6) * message_s(1000))
