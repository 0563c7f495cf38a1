"""Islands and racks: what is linked clearly faster inside than to the outside."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.schema.cluster.cluster import Device
from gpumix.schema.cluster.link_islands import (
    TIMES_FASTER,
    Links,
    PairTimes,
    add_found_islands,
    find_smallest_place,
    group_by_link_speed,
)
from gpumix.schema.curve import Curve

NVLINK, SWITCH, PCIE = 1.0, 14.0, 25.0


def links(names: str, fast: dict[str, float], slow: float = PCIE) -> dict[tuple[str, str], float]:
    """Seconds between each two, all but some `slow`."""
    return {(a, b): fast.get(a + b, slow) for a, b in combinations(names, 2)}


def test_pairs_that_a_bridge_links_are_islands():
    assert group_by_link_speed("abcd", links("abcd", {"ac": NVLINK, "bd": NVLINK})) == [
        ("a", "c"),
        ("b", "d"),
    ]


def test_the_clearest_of_several_levels_counts():
    """Bridged pairs, two of them behind each switch."""
    fast = dict.fromkeys(["ab", "cd", "ef", "gh"], NVLINK)
    fast |= dict.fromkeys(["ac", "ad", "bc", "bd", "eg", "eh", "fg", "fh"], SWITCH)
    pairs = [tuple(two) for two in ("ab", "cd", "ef", "gh")]
    assert group_by_link_speed("abcdefgh", links("abcdefgh", fast)) == pairs


def test_who_has_no_bridge_is_in_none():
    assert group_by_link_speed("abcd", links("abcd", {"bd": NVLINK})) == [("b", "d")]


def test_a_mesh_in_which_not_all_are_linked_is_no_island():
    """Each reaches the others through a third, or over slow links."""
    mesh = dict.fromkeys(["ab", "bc", "cd", "ad"], NVLINK)
    assert group_by_link_speed("abcd", links("abcd", mesh)) == []


@pytest.mark.parametrize("factor", [1.0, 1.2, 0.99 * TIMES_FASTER])
def test_links_that_are_nearly_alike_make_none(factor):
    assert group_by_link_speed("abcd", links("abcd", {"ac": 1.0, "bd": 1.0}, slow=factor)) == []


def test_nothing_is_said_where_a_link_is_not_known():
    known = links("abcd", {"ac": NVLINK, "bd": NVLINK})
    del known["b", "c"]
    assert group_by_link_speed("abcd", known) == []


@given(st.integers(3, 7), st.data())
def test_links_inside_are_faster_than_all_that_leave(count, data):
    names = "abcdefg"[:count]
    seconds = st.sampled_from([1.0, 1.1, 1.4, 2.0, 3.5, 6.0])
    known = {pair: data.draw(seconds) for pair in combinations(names, 2)}
    islands = group_by_link_speed(names, known)
    members = [name for island in islands for name in island]
    assert len(set(members)) == len(members)
    of = {name: number for number, island in enumerate(islands) for name in island}
    for island in islands:
        inside = [s for pair, s in known.items() if set(pair) <= set(island)]
        leaving = [s for (a, b), s in known.items() if (a in island) != (b in island)]
        assert max(inside) * TIMES_FASTER <= min(leaving)
    order = data.draw(st.permutations(names))
    assert {frozenset(i) for i in group_by_link_speed(order, known)} == {
        frozenset(i) for i in islands
    }
    assert len(of) < count or len(islands) != 1


# -- devices ---------------------------------------------------------------------------------------


def timed(devices: list[Device], seconds: dict[tuple[str, str], float]) -> list[PairTimes]:
    """Messages between devices by their ids."""
    number = {device.id: n for n, device in enumerate(devices)}
    return [
        PairTimes(one=number[a], other=number[b], times=Curve(sizes=(1.0,), values=(s,)))
        for (a, b), s in seconds.items()
    ]


def on(host: str, names: str, device_class: str = "card", **update: str) -> list[Device]:
    return [Device(id=n, device_class=device_class, host=host, **update) for n in names]


def test_devices_of_two_classes_are_in_no_island_together():
    """The slow class is linked as slowly inside as to the fast one: that makes no islands of it."""
    devices = [*on("h", "ab", "fast"), *on("h", "cd", "slow")]
    fast = links("abcd", {"ab": NVLINK})
    assert not any(d.island for d in add_found_islands(devices, timed(devices, fast)))


def test_islands_of_a_host_have_names_of_their_own():
    devices = [*on("h", "abc", "one"), *on("h", "def", "two"), *on("i", "xyz", "one")]
    fast = links("abcdef", {"ab": NVLINK, "de": NVLINK}) | links("xyz", {"yz": NVLINK})
    found = {d.id: d.island for d in add_found_islands(devices, timed(devices, fast))}
    first, second, none = (dict.fromkeys(*of) for of in (("abyz", "0"), ("de", "1"), ("cfx", "")))
    assert found == first | second | none


def test_what_is_stated_stays():
    devices = on("h", "ab", island="mine") + on("h", "cd")
    fast = timed(devices, links("abcd", {"ac": NVLINK, "bd": NVLINK}))
    assert list(add_found_islands(devices, fast)) == devices


def test_how_near_devices_are():
    one, other = on("h", "ab", island="0", rack="r"), on("h", "c", island="1", rack="r")
    beside, far = on("i", "d", rack="r"), on("j", "e")
    assert find_smallest_place(one) == "island"
    assert (
        find_smallest_place([*one, *other]) == find_smallest_place(other + on("h", "f")) == "inside"
    )
    assert find_smallest_place([*one, *beside]) == "rack"
    assert find_smallest_place([*one, *far]) == find_smallest_place([*far, *on("k", "g")]) == "all"


def test_a_message_takes_what_the_middle_link_between_two_places_takes():
    devices = [*on("h", "ab", island="0"), *on("h", "cd", island="1"), *on("i", "e")]
    seconds = links("abcd", {"ab": 1.0, "cd": 2.0, "ac": 30.0, "bd": 20.0})
    found = Links.of(devices, timed(devices, seconds | {("e", "b"): 99.0}))

    def between(one: int, other: int) -> float:
        curve = found.times(devices[one], devices[other])
        assert curve is not None
        return curve.values[0]

    assert (between(0, 1), between(3, 2)) == (1.0, 2.0)
    assert between(0, 2) == between(3, 1) == between(1, 2) == PCIE
    assert between(4, 0) == between(2, 4) == 99.0
    assert Links.model_validate_json(found.model_dump_json()) == found
    assert Links().times(devices[0], devices[1]) is None
