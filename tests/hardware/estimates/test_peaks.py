"""Peaks are a class's own, or none."""

from __future__ import annotations

import pytest

from gpumix.hardware.estimates.gpu_catalogue import find_card
from gpumix.hardware.estimates.stated_peak import find_stated_peak
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.peak_flops import Peak


def of(product: str = "", **fields) -> DeviceClass:
    known = {"name": "c", "accelerator": "cuda", "memory_bytes": 2**30, "product": product}
    return DeviceClass(**(known | fields))


def test_a_datasheet_states_the_rate_of_the_dtype():
    card = find_card("rtx3090")
    for dtype in ("fp32", "bf16"):
        rate = getattr(card.flops, dtype)
        assert find_stated_peak(of(card.product), dtype) == Peak(flops_per_s=rate, source="stated")


@pytest.mark.parametrize(
    "product", ["", "NVIDIA GeForce RTX 3090 Laptop GPU", "NVIDIA RTX 9999", "3090", "Tesla"]
)
def test_a_card_that_nobody_knows_has_none(product):
    assert find_stated_peak(of(product), "bf16") is None


def test_memory_decides_where_several_cards_have_one_product():
    product = "NVIDIA GeForce RTX 3080"
    for name in ("rtx3080-10gb", "rtx3080-12gb"):
        card = find_card(name)
        peak = find_stated_peak(of(product, memory_bytes=card.memory_bytes - 2**28), "bf16")
        assert peak == Peak(flops_per_s=card.flops.bf16, source="stated")
    assert find_stated_peak(of(product, memory_bytes=2**33), "bf16") is None


def test_what_the_user_says_counts_before_the_datasheet():
    said = of(find_card("rtx3090").product, peak_flops_per_s=1e12)
    assert find_stated_peak(said, "bf16") == Peak(flops_per_s=1e12, source="stated")


def test_an_emulated_device_has_its_rate_and_a_cpu_none():
    emulated = of("", accelerator="cpu", emulate_flops_per_s=2e9)
    assert find_stated_peak(emulated, "fp32") == Peak(flops_per_s=2e9, source="emulated")
    assert find_stated_peak(of("Xeon", accelerator="cpu"), "fp32") is None
