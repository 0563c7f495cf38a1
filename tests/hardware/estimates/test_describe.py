"""Clusters in one line."""

from __future__ import annotations

from collections import Counter

import pytest

from gpumix.hardware.estimates.cluster_shorthand import parse_cards, parse_cluster
from gpumix.schema.errors import InputError
from helpers.errors import raises


def counts(found):
    return Counter((d.host, d.device_class) for d in found.devices)


def test_commas_join_cards_of_one_host():
    found = parse_cluster("4x rtx3090, 2x p40", "fp16")
    assert counts(found) == {("host-0", "rtx3090"): 4, ("host-0", "p40"): 2}
    assert sorted(d.ordinal for d in found.devices) == list(range(6))
    assert found.class_named("rtx3090").memory_bytes == 24 * 2**30
    assert found.class_named("p40").memory_bytes == 22.5 * 2**30  # the rest corrects errors


def test_hosts_are_separated_and_repeated():
    found = parse_cluster("2 hosts of 2x t4, 1x l4; p40", "fp16", "25GbE")
    assert counts(found) == {
        ("host-0", "t4"): 2, ("host-0", "l4"): 1,
        ("host-1", "t4"): 2, ("host-1", "l4"): 1,
        ("host-2", "p40"): 1,
    }  # fmt: skip
    assert found.network is not None
    assert found.network.between is not None
    assert found.network.between.name == "25GbE"


def test_hosts_without_a_link_are_refused():
    with raises(InputError, code="network-missing", what=2):
        parse_cluster("t4; t4", "fp16")


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("4x rtx3090", "rtx3090", 4),
        ("2xp40", "p40", 2),
        ("t4", "t4", 1),
        ("2X p40", "p40", 2),
        ("2× p40", "p40", 2),
        ("3x 3090 24GB", "rtx3090", 3),
    ],
)
def test_cards(text, name, count):
    found = parse_cards(text)
    assert (found.card.name, found.count) == (name, count)


@pytest.mark.parametrize(
    "text", ["0x p40", "", "4x", "3x voodoo2", "p40,,t4", f"{'9' * 5000}x p40"]
)
def test_what_is_no_card_is_an_error(text):
    with pytest.raises(InputError):
        parse_cluster(text, "fp16")


def test_cards_of_a_kind_use_their_own_fabric_and_others_their_slots():
    found = parse_cluster("8x a100-80gb-sxm, 1x p40", "fp16")
    assert found.network is not None
    same = found.network.of("inside", "a100-80gb-sxm", "a100-80gb-sxm")
    mixed = found.network.of("inside", "p40", "a100-80gb-sxm")
    assert same is not None
    assert mixed is not None
    assert same.name == "nvlink"
    assert mixed.name == "PCIe 3.0 x16"
    assert same.largest_bytes_per_s > 10 * mixed.largest_bytes_per_s


def test_bf16_is_no_faster_than_fp32_where_there_is_none():
    old = parse_cluster("v100-16gb-sxm", "bf16").classes[0]
    assert (
        old.peak_flops_per_s == parse_cluster("v100-16gb-sxm", "fp32").classes[0].peak_flops_per_s
    )
    assert (
        parse_cluster("v100-16gb-sxm", "fp16").classes[0].peak_flops_per_s
        > 5 * old.peak_flops_per_s
    )
