"""Estimates from the catalogue: every chip has its own constants, shared slots count in part."""

from __future__ import annotations

import pytest

from gpumix.hardware.estimates.gpu_catalogue import find_card, load_cards
from gpumix.hardware.estimates.roofline import (
    GENERAL_FRACTIONS,
    MATRIX_FRACTIONS,
    compute_optimizer_s_per_element,
    get_peak_flops_per_s,
    get_peak_fraction,
    get_reached_flops_per_s,
    make_forward_curve,
    make_gradient_curve,
    make_half_gradient_curve,
    make_host_copy_curve,
)


def test_every_architecture_has_a_reach_of_its_own():
    assert {card.target for card in load_cards()} == set(GENERAL_FRACTIONS)
    assert {card.target for card in load_cards() if card.matrix_units} == set(MATRIX_FRACTIONS)


@pytest.mark.parametrize(
    ("name", "dtype", "assumed"),
    [
        ("a100", "bf16", False), ("p40", "fp32", False), ("gaudi2", "bf16", False),
        ("gaudi2", "fp32", True), ("rx7900xtx", "bf16", True), ("mi300x", "bf16", True),
        ("rtx5090", "bf16", True), ("m40", "fp32", True),
    ],
)  # fmt: skip
def test_what_nobody_published_is_marked_as_assumed(name, dtype, assumed):
    assert get_peak_fraction(find_card(name), dtype).assumed == assumed


@pytest.mark.parametrize(
    ("sharing", "alone", "part"), [("a16", "a40", 4), ("gb200", "gh200-96gb", 2)]
)
def test_gpus_that_share_a_link_to_the_host_copy_at_their_part(sharing, alone, part):
    ours, theirs = (make_host_copy_curve(find_card(name)).values[-1] for name in (sharing, alone))
    assert ours / theirs == pytest.approx(part, rel=1e-3)


CARDS = ("p40", "v100-16gb-sxm", "rtx3090", "l4", "h100-sxm", "mi250x-gcd", "b580", "rx7900xtx")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_is_reached_is_part_of_what_is_promised(dtype):
    for card in load_cards():
        reached = get_reached_flops_per_s(card, dtype)
        assert (
            0.05 * get_peak_flops_per_s(card, dtype) < reached < get_peak_flops_per_s(card, dtype)
        ), card.name
        assert get_peak_flops_per_s(card, dtype) >= card.flops.fp32


def test_narrow_products_pay_only_on_matrix_units():
    assert get_peak_flops_per_s(find_card("p40"), "fp16") == find_card("p40").flops.fp32
    assert (
        get_peak_flops_per_s(find_card("v100-16gb-sxm"), "bf16")
        == find_card("v100-16gb-sxm").flops.fp32
    )
    assert (
        get_peak_flops_per_s(find_card("v100-16gb-sxm"), "fp16")
        == find_card("v100-16gb-sxm").flops.fp16
    )


@pytest.mark.parametrize("name", CARDS)
def test_a_forward_by_hand(name):
    """Few samples wait for the weights, many for the products."""
    card = find_card(name)
    curve = make_forward_curve(card, "fp16", flops=2e11, weight_bytes=4e8)
    weights_s = 4e8 / (0.8 * card.memory_bandwidth)
    products_s = 2e11 / get_reached_flops_per_s(card, "fp16")
    assert curve.sizes[:3] == (1, 2, 4)
    for samples, seconds in zip(curve.sizes, curve.values):
        assert seconds == pytest.approx(2e-4 + max(weights_s, samples * products_s))


@pytest.mark.parametrize("name", CARDS)
def test_a_backward_by_hand(name):
    """Twice the products of the forward, and 16 bytes for each element's gradient."""
    card = find_card(name)
    curve = make_gradient_curve(card, "fp16", flops=2e11, elements=1e8)
    added_s = 16e8 / (0.8 * card.memory_bandwidth)
    for samples, seconds in zip(curve.sizes, curve.values):
        expected = 4e-4 + samples * 4e11 / get_reached_flops_per_s(card, "fp16") + added_s
        assert seconds == pytest.approx(expected)


@pytest.mark.parametrize("name", CARDS)
def test_moved_tensors_add_to_the_products(name):
    """Once in a forward, twice in a backward and in the half of it that has the inputs' part."""
    card = find_card(name)
    moved_s = 3e8 / (0.8 * card.memory_bandwidth)
    for moves, make in (
        (1, lambda moved: make_forward_curve(card, "fp16", 2e13, 0.0, moved)),
        (2, lambda moved: make_gradient_curve(card, "fp16", 2e13, 1e8, moved)),
        (2, lambda moved: make_half_gradient_curve(card, "fp16", 2e13, moved)),
    ):
        for samples, without, seconds in zip(make(0.0).sizes, make(0.0).values, make(3e8).values):
            assert seconds - without == pytest.approx(moves * samples * moved_s)


@pytest.mark.parametrize(("state_bytes", "moved"), [(8, 28), (4, 20), (0, 12)])
def test_an_update_reads_and_writes_parameter_and_state(state_bytes, moved):
    """AdamW, SGD with momentum, SGD: the gradient is only read."""
    card = find_card("rtx3090")
    found = compute_optimizer_s_per_element(card, state_bytes)
    assert found == pytest.approx(moved / (0.8 * card.memory_bandwidth))


def test_copies_to_the_host_take_the_slot():
    card = find_card("rtx3090")
    bandwidth = card.host_link.bandwidth
    assert bandwidth == pytest.approx(31.5e9, rel=0.01)  # PCIe 4.0 x16
    copied = make_host_copy_curve(card)
    assert copied.values[-1] == pytest.approx(copied.sizes[-1] / (0.75 * bandwidth), rel=1e-3)
