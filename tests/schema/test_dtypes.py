"""What each device class computes in: the table, what a job asks for, and what all gather in."""

from __future__ import annotations

import pytest

from gpumix.hardware.estimates.cluster_shorthand import make_device_class, parse_cluster
from gpumix.hardware.estimates.gpu_catalogue import find_card, load_cards
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.errors import InputError
from gpumix.schema.plan.dtypes import (
    UNKNOWN,
    choose_communication_dtype,
    choose_compute_dtypes,
    explain_compute_dtype,
    get_dtype_support,
)
from helpers.errors import raises

MIXED = parse_cluster("1x p40, 1x v100-16gb-sxm, 1x a100-80gb-sxm")
BY_ITSELF = {"p40": "fp32", "v100-16gb-sxm": "fp16", "a100-80gb-sxm": "bf16"}


def test_every_card_of_the_catalogue_computes_in_what_it_does_best():
    for card in load_cards():
        support = get_dtype_support(make_device_class(card))
        assert support is not UNKNOWN, card.name
        assert support.why, card.name
        flops = card.flops
        if support.usual == "bf16":
            assert card.matrix_units, card.name
            assert flops.bf16 >= max(flops.fp32, flops.fp16 or 0.0), card.name
        if support.usual == "fp16":  # faster than fp32, and than bf16 if it has that
            assert flops.fp16 > flops.fp32, card.name
            assert flops.bf16 is None or flops.fp16 > flops.bf16, card.name
        if support.usual == "fp32":
            assert not card.matrix_units, card.name
        assert support.usual not in support.unable | support.slow, card.name
        if card.vendor == "nvidia" and flops.bf16 is None:
            assert "bf16" in support.unable | support.slow, card.name


@pytest.mark.parametrize(
    "name, dtype",
    [("p100-16gb-pcie", "fp32"), ("t4", "fp16"), ("rtx3090", "bf16"), ("mi100", "fp16")],
)
def test_some_cards(name, dtype):
    assert get_dtype_support(make_device_class(find_card(name))).usual == dtype


def one(**settings) -> DeviceClass:
    return DeviceClass(name="one", memory_bytes=2**30, **settings)


def test_cpus_emulated_devices_and_unknown_gpus_compute_in_fp32():
    emulated = one(accelerator="cpu", emulate_flops_per_s=1e9, compute_capability="8.0")
    for unlike in (one(accelerator="cpu"), emulated, one(accelerator="cuda")):
        assert get_dtype_support(unlike).usual == "fp32"
        assert not get_dtype_support(unlike).unable
    assert get_dtype_support(one(accelerator="cuda", compute_capability="5.2")).usual == "fp32"


def test_each_class_by_itself_or_as_it_is_told():
    assert choose_compute_dtypes("auto", MIXED) == BY_ITSELF
    assert choose_compute_dtypes("fp16", MIXED) == dict.fromkeys(BY_ITSELF, "fp16")
    told = choose_compute_dtypes({"a100-80gb-sxm": "fp16", "p40": "fp16"}, MIXED)
    assert told == dict.fromkeys(BY_ITSELF, "fp16")
    assert (
        choose_compute_dtypes({"v100-16gb-sxm": "bf16"}, MIXED)["v100-16gb-sxm"] == "bf16"
    )  # slow


@pytest.mark.parametrize("wanted", ["bf16", {"p40": "bf16"}])
def test_what_a_class_cannot_do_is_refused(wanted):
    with raises(InputError, code="dtype-unsupported-by-class", what=("p40", "bf16")) as caught:
        choose_compute_dtypes(wanted, MIXED)
    assert "libraries" in caught.value.why
    assert "fp32" in caught.value.fix


def test_a_class_that_is_not_there_is_refused():
    with raises(InputError, code="device-class-unknown", what="a100") as caught:
        choose_compute_dtypes({"a100": "bf16"}, MIXED)
    assert "a100-80gb-sxm" in caught.value.why


def test_reasons_say_what_speaks_against_a_choice():
    v100 = MIXED.class_named("v100-16gb-sxm")
    assert explain_compute_dtype(v100, "fp16") == get_dtype_support(v100).why
    assert explain_compute_dtype(v100, "bf16").startswith("as asked; bf16 is computed in software")
    of_cpus = explain_compute_dtype(
        one(accelerator="cpu"), "bf16"
    )  # whether it has instructions is not known
    assert "with instructions for it" in of_cpus and "slower on others" in of_cpus
    assert (
        explain_compute_dtype(v100, "fp32")
        == f"as asked; by itself it would be fp16: {get_dtype_support(v100).why}"
    )


@pytest.mark.parametrize(
    "computed, gathered",
    [
        (["fp32"], "fp32"),
        (["fp16", "fp16"], "fp16"),
        (["fp32", "bf16"], "bf16"),
        (["fp32", "fp16"], "fp16"),
        (["fp16", "bf16", "fp32"], "bf16"),
    ],
)
def test_all_gather_in_one_dtype(computed, gathered):
    assert choose_communication_dtype(computed) == gathered


def test_peaks_are_of_what_a_class_computes_in():
    peaks = {c.name: c.peak_flops_per_s for c in MIXED.classes}
    assert peaks["p40"] == find_card("p40").flops.fp32
    assert peaks["v100-16gb-sxm"] == find_card("v100-16gb-sxm").flops.fp16
