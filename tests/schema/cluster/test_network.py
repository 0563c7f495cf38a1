"""Links as their owner states them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gpumix.schema.cluster.network import Link, Network, parse_link


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("25GbE", 2.4e9, 3.125e9),
        ("100 Gb/s", 9.5e9, 12.5e9),
        ("12 GB/s", 11.9e9, 12e9),
        ("ib-hdr", 20e9, 25e9),
        ("NVLink3", 200e9, 300e9),
        ("pcie4", 20e9, 31.5e9),
    ],
)
def test_names_and_rates(text, low, high):
    assert low < parse_link(text).largest_bytes_per_s <= high


@pytest.mark.parametrize("text", ["", "fast", "25", "25 GB", "-3 GB/s", "0 GB/s", "0GbE"])
def test_what_is_no_link(text):
    with pytest.raises(ValueError, match=r"link|more than 0"):
        parse_link(text)


def test_bits_and_bytes_are_told_apart():
    assert parse_link("10 GB/s").largest_bytes_per_s > 7 * parse_link("10 Gb/s").largest_bytes_per_s


def test_the_most_special_link_counts():
    network = Network(
        inside="pcie3",
        between="10GbE",
        exceptions=[{"where": "inside", "classes": ["a", "b"], "link": "nvlink3"}],
    )
    assert network.of("inside", "b", "a").name == "nvlink3"
    assert network.of("inside", "a", "a").name == "pcie3"
    assert network.of("between", "a", "b").name == "10GbE"
    assert Network(inside="pcie3").of("between", "a", "a") is None


def test_a_network_without_links_and_links_without_bandwidth_are_refused():
    with pytest.raises(ValidationError, match="link"):
        Network()
    with pytest.raises(ValidationError, match="more than 0"):
        Network(between="0 GB/s")
    with pytest.raises(ValueError, match="more than 0"):
        Link.stated(0.0, 1e-5)


def test_a_link_is_read_back_as_it_was_written():
    network = Network(between="25GbE")
    assert Network.model_validate_json(network.model_dump_json()) == network
