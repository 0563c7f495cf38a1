"""The catalogue: every card has a source and obeys the laws of its architecture; find() helps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from gpumix.hardware.estimates.gpu_catalogue import (
    Card,
    CoherentLink,
    DeviceLink,
    DeviceLinkKind,
    PcieLink,
    find_card,
    find_other_forms,
    find_product,
    load_cards,
    shorten_product,
)
from gpumix.schema.errors import InputError
from helpers.errors import raises

GIB = 2**30
MIB = 2**20
GB = 10**9
CARDS = load_cards()


@dataclass(frozen=True)
class Chip:
    """What cards of one compute capability or gfx target have in common."""

    architecture: str
    formats: str
    """What it multiplies beside fp32."""
    fp16_ratio: tuple[float, float]
    """The fp16 rate for one of fp32, lowest and highest."""
    memory: str
    bus_bits: set[int]
    pin_gbits: tuple[float | tuple[float, float], ...]
    """Data rates that were sold; a pair is the lowest and highest of a kind of memory."""
    pcie: int
    link: tuple[float, int] | None = None
    """GB/s of one link in one direction, and the most links that it has."""


AMPERE = "tf32 fp16 bf16"
NEWEST = AMPERE + " fp8"
CHIPS = {
    "5.2": Chip("maxwell", "", (0, 0), "gddr", {384}, (6,), pcie=3),
    "6.0": Chip(
        "pascal", "fp16", (2, 2.02), "hbm", {3072, 4096}, ((1.42, 1.44),), pcie=3, link=(20, 4)
    ),
    "6.1": Chip(
        "pascal", "", (0, 0), "gddr", {192, 256, 352, 384}, (6, 7.2, 8, 10, 11, 11.4), pcie=3
    ),
    "7.0": Chip(
        "volta", "fp16", (7.3, 8.1), "hbm", {3072, 4096}, ((1.69, 1.77), (2.2, 2.22)), 3, (25, 6)
    ),
    "7.5": Chip(
        "turing", "fp16", (7.9, 8.1), "gddr", {192, 256, 352, 384}, (10, 13, 14, 15.5), 3, (25, 2)
    ),
    "8.0": Chip(
        "ampere", AMPERE, (15.9, 16.1), "hbm", {3072, 5120}, ((2.42, 2.44), (3, 3.2)), 4, (25, 12)
    ),
    "8.6": Chip(
        "ampere", AMPERE, (3.95, 4.05), "gddr", {128, 192, 256, 320, 384},
        (12, 12.5, 14, 14.5, 15, 16, 19, 19.5, 21), pcie=4, link=(14.0625, 4),
    ),
    "8.9": Chip(
        "ada", NEWEST, (3.95, 4.05), "gddr", {96, 128, 160, 192, 256, 384},
        (12.5, 14, 16, 17, 18, 20, 21, 22.4, 23), pcie=4,
    ),
    "9.0": Chip(
        "hopper", NEWEST, (13.9, 14.9), "hbm", {5120, 6144}, ((3.1, 3.2), (5, 5.3), (6.2, 6.4)),
        pcie=5, link=(25, 18),
    ),
    "10.0": Chip(
        "blackwell", NEWEST, (29, 31.3), "hbm", {7680, 8192}, ((7.8, 8.05),), 5, (50, 18)
    ),
    "10.3": Chip(
        "blackwell", NEWEST, (30, 31.3), "hbm", {7680, 8192}, ((7.8, 8.05),), 6, (50, 18)
    ),
    "12.0": Chip(
        "blackwell", NEWEST, (3.95, 4.05), "gddr", {128, 192, 256, 384, 512}, (24, 25, 28, 30), 5
    ),
    "12.1": Chip("blackwell", NEWEST, (3.95, 4.05), "lpddr", {256}, (8.533,), pcie=5),
    "gfx906": Chip("gcn5", "fp16", (1.98, 2.02), "hbm", {4096}, (2,), pcie=4, link=(50, 2)),
    "gfx908": Chip("cdna", "fp16 bf16", (3.98, 4.02), "hbm", {4096}, (2.4,), 4, link=(46, 3)),
    "gfx90a": Chip("cdna2", "fp16 bf16", (3.98, 4.02), "hbm", {4096}, (3.2,), 4, link=(50, 3)),
    "gfx942": Chip("cdna3", NEWEST, (7.98, 8.02), "hbm", {8192}, ((5.1, 6),), 5, link=(64, 7)),
    "gfx950": Chip(
        "cdna4", "fp16 bf16 fp8", (15.98, 16.02), "hbm", {8192}, ((7.8, 8),), 5, link=(76.8, 7)
    ),
    "gfx1030": Chip("rdna2", "fp16", (1.98, 2.02), "gddr", {256}, (16,), pcie=4),
    "gfx1100": Chip("rdna3", "fp16 bf16", (1.98, 2.02), "gddr", {320, 384}, (18, 20), pcie=4),
    "gfx1201": Chip("rdna4", "fp16 bf16 fp8", (3.95, 4.05), "gddr", {256}, (20,), pcie=5),
    "dg2": Chip("xe-hpg", "fp16 bf16", (7.5, 8.1), "gddr", {256}, (17.5,), pcie=4),
    "bmg": Chip("xe2-hpg", "fp16 bf16", (8.4, 8.6), "gddr", {192}, (19,), pcie=4),
    "pvc": Chip("xe-hpc", AMPERE, (15.9, 16.1), "hbm", {4096}, (2.4, 3.2), pcie=5),
    "gaudi2": Chip(
        "gaudi2", "bf16 fp8", (0, 0), "hbm", {6144}, ((3.1, 3.3),), pcie=4, link=(12.5, 21)
    ),
    "gaudi3": Chip("gaudi3", NEWEST, (1.9, 2.1), "hbm", {8192}, ((3.5, 3.7),), 5, link=(25, 21)),
}  # fmt: skip
HALF_THE_TENSOR_RATE = {"a10g", "l40", "l20"}  # as their vendor states it
CUT_TENSOR_RATE = {"h20-96gb", "h20-141gb"}
CORES_PER_SM = {"volta": 64, "turing": 64}  # 128 elsewhere
WITHOUT_MATRIX_UNITS = {"maxwell", "pascal", "gcn5"}
VENDOR_SITES = {
    "nvidia": ("nvidia.com", "nvidia.cn", "awsstatic.com"),
    "amd": ("amd.com",),
    "intel": ("intel.com", "habana.ai"),
}
USER_SITES = ("lmsys.org", "arxiv.org")  # of cards for one country


def every_card(test: Callable[[Card], None]) -> Callable[[], None]:
    """The test of all cards, as one: looking at a card takes less than having a test of its own."""

    def of_all() -> None:
        for card in CARDS:
            try:
                test(card)
            except AssertionError as error:
                raise AssertionError(card.name) from error

    return of_all


def chip(card):
    return CHIPS[card.target]


def test_there_are_many_cards():
    assert len(CARDS) >= 160
    assert {card.target for card in CARDS} == set(CHIPS)


def test_names_and_aliases_are_unique():
    spellings = Counter(text for card in CARDS for text in (card.name, *card.aliases))
    assert [text for text, count in spellings.items() if count > 1] == []


def test_product_and_memory_tell_cards_apart():
    pairs = Counter((card.product, card.memory_bytes) for card in CARDS)
    assert [pair for pair, count in pairs.items() if count > 1] == []


@every_card
def test_each_card_has_a_source_at_its_vendor(card):
    url = urlsplit(card.source)
    assert url.scheme == "https"
    sites = VENDOR_SITES[card.vendor]
    assert url.hostname.endswith(sites + USER_SITES if "for China" in card.note else sites)


@every_card
def test_target_belongs_to_the_architecture(card):
    assert card.architecture == chip(card).architecture
    nvidia, amd = card.target[0].isdigit(), card.target.startswith("gfx")
    assert card.vendor == ("nvidia" if nvidia else "amd" if amd else "intel")
    accelerators = {"gaudi2": "hpu", "gaudi3": "hpu", "dg2": "xpu", "bmg": "xpu", "pvc": "xpu"}
    assert card.accelerator == accelerators.get(card.target, "cuda")


@every_card
def test_modified_cards_differ_from_the_sold_one_in_memory_alone(card):
    if card.modified:
        sold = [one for one in CARDS if one.product == card.product and not one.modified]
        first = sold[0]
        assert card.memory_bytes > max(one.memory_bytes for one in sold)
        assert (card.flops, card.memory_bandwidth) == (first.flops, first.memory_bandwidth)
        assert card.tdp_watts == first.tdp_watts


@every_card
def test_gpus_of_laptops_are_named_so_and_state_their_power(card):
    laptop = card.product.endswith(" Laptop GPU")
    assert ("laptop" in card.name) == laptop
    if laptop:
        assert card.derived
        assert f"at {card.tdp_watts} W" in card.note


@every_card
def test_sizes_are_plausible(card):
    assert 2 * GIB <= card.memory_bytes <= 300 * GIB
    assert 3e12 <= card.flops.fp32 <= 250e12
    assert card.tdp_watts is None or 40 <= card.tdp_watts <= 1500


@every_card
def test_memory_is_as_fast_as_a_bus_of_its_kind(card):
    known = chip(card)
    rates = [r if isinstance(r, tuple) else (0.995 * r, 1.005 * r) for r in known.pin_gbits]
    pins = [card.memory_bandwidth * 8 / bits / 1e9 for bits in known.bus_bits]
    assert any(low <= pin <= high for pin in pins for low, high in rates), pins


@every_card
def test_error_correction_is_in_the_memory_of_data_centre_cards_without_hbm(card):
    inside = card.family == "data-centre" and chip(card).memory == "gddr"
    assert card.ecc_in_memory == inside
    assert card.visible_bytes == card.memory_bytes * (15 if inside else 16) // 16


@pytest.mark.parametrize(
    ("name", "reported_mib"),
    [
        ("m40-12gb", 11448), ("m40-24gb", 22945), ("gb10", 122502),
        ("p40", 22919), ("p4", 7611), ("t4", 15360), ("a10g", 23028), ("a10", 23028),
        ("a40", 46068), ("a16", 15356), ("l4", 23034), ("l40s", 46068), ("rtxa6000", 49140),
        ("h200", 143771), ("gh200-144gb", 146831), ("b200", 183359), ("b300", 275040),
        ("gb300", 284208),
    ],
)  # fmt: skip
def test_programs_see_the_memory_that_the_driver_reports(name, reported_mib):
    assert 1 <= find_card(name).visible_bytes / (reported_mib * MIB) < 1.011


@every_card
def test_a_rate_is_there_where_the_chip_has_the_format(card):
    stated = {name for name, rate in card.flops if rate is not None}
    assert stated == {"fp32", *chip(card).formats.split()}
    assert card.matrix_units == (card.architecture not in WITHOUT_MATRIX_UNITS)


@every_card
def test_matrix_units_halve_their_rate_with_every_doubling_of_the_number(card):
    rates = card.flops
    if card.architecture == "gaudi3":  # which is made for bf16 and fp8
        assert rates.bf16 == rates.fp8 == pytest.approx(4 * rates.fp16, rel=0.01)
        return
    for wide, narrow in ((rates.tf32, rates.fp16), (rates.fp16, rates.fp8)):
        if wide and narrow:
            assert narrow == pytest.approx(2 * wide, rel=0.03)
    if rates.bf16 is not None and rates.fp16 is not None:
        assert rates.bf16 == rates.fp16 / (2 if card.architecture == "cdna" else 1)


@every_card
def test_fp16_has_the_ratio_to_fp32_of_its_chip(card):
    """Neither sparse, nor with fp16 sums where the chip is slower with fp32 ones."""
    low, high = chip(card).fp16_ratio
    ratio = (card.flops.fp16 or 0) / card.flops.fp32
    if card.name in CUT_TENSOR_RATE:
        assert ratio < low / 2
        return
    halved = card.fp32_accumulate_halved or card.name in HALF_THE_TENSOR_RATE
    assert low <= ratio * (1 + halved) <= high


@every_card
def test_a_derived_rate_says_from_what_and_follows_from_it(card):
    if not card.derived:
        return
    assert card.note
    clock = re.search(r"(\d+) (SM|CU)s at (\d+) MHz", card.note)
    if clock is not None:
        products = CORES_PER_SM.get(card.architecture, 128)  # matrix units of CDNA do as many
        made = int(clock[1]) * products * 2 * int(clock[3]) * 1e6
        assert card.flops.fp32 == pytest.approx(made, rel=0.006)


@every_card
def test_only_geforce_halves_with_fp32_accumulate(card):
    titan = "TITAN" in card.product
    assert card.fp32_accumulate_halved == (
        card.family == "geforce" and card.matrix_units and not titan
    )


@every_card
def test_the_slot_is_of_the_generation_of_the_chip(card):
    if isinstance(card.host_link, CoherentLink):
        assert card.target in {"9.0", "10.0", "10.3", "12.1"}
        assert card.host_link.bandwidth in {450 * GB, 225 * GB, 300 * GB}  # 225: two GPUs share it
    else:
        assert card.host_link.generation == chip(card).pcie


@every_card
def test_a_device_link_is_a_number_of_links_of_the_chip_in_one_direction(card):
    link = card.device_link
    if link is not None and link.kind is not DeviceLinkKind.NONE:
        assert link.kind.startswith("nvlink") == (card.vendor == "nvidia")
        assert chip(card).link is not None
        speed, most = chip(card).link
        count = link.bandwidth / (speed * GB)
        assert count == pytest.approx(round(count))
        assert 1 <= count <= most


def test_rates_of_well_known_cards():
    a100, rtx3090 = find_card("a100-80gb-sxm"), find_card("rtx3090")
    assert (a100.flops.bf16, a100.flops.tf32, a100.memory_bandwidth) == (312e12, 156e12, 2039 * GB)
    assert (a100.memory_bytes, a100.device_link.bandwidth) == (80 * GIB, 300 * GB)
    assert rtx3090.flops.bf16 == pytest.approx(71e12, rel=0.005)
    assert find_card("h100-80gb-sxm").flops.fp16 == pytest.approx(
        989e12, rel=0.005
    )  # not 1979, sparse
    assert find_card("rtx4090").flops.fp16 == pytest.approx(
        165.2e12, rel=0.005
    )  # not 330, fp16 sums
    assert find_card("p40").flops.fp16 is None
    assert find_card("mi250x").memory_bytes == 64 * GIB  # one die of the two


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx3090", "rtx3090"),
        ("RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("GeForce GTX 1080 Ti", "gtx1080ti"),
        ("3090", "rtx3090"),
        ("a100-sxm4-40gb", "a100-40gb-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-sxm"),
        ("NVIDIA RTX A2000", "rtxa2000-6gb"),
        ("NVIDIA H200", "h200-141gb-sxm"),
        ("Tesla P100-SXM2-16GB", "p100-16gb-sxm"),
        ("RTX PRO 6000 Blackwell Max-Q", "rtxpro6000-maxq"),
        ("tesla_p40", "p40"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla V100-SXM2-32GB", "v100-32gb-sxm"),
        ("Tesla V100-SXM3-32GB", "v100-32gb-sxm"),
        ("NVIDIA A800-SXM4-80GB", "a800-80gb-sxm"),
        ("NVIDIA A800 80GB PCIe", "a800-80gb-pcie"),
        ("NVIDIA H800", "h800-80gb-sxm"),
        ("NVIDIA H800 PCIe", "h800-80gb-pcie"),
        ("NVIDIA H20", "h20-96gb"),
        ("NVIDIA L20", "l20"),
        ("NVIDIA B100", "b100"),
        ("NVIDIA GB10", "gb10"),
        ("DGX Spark", "gb10"),
        ("Tesla M40", "m40-12gb"),
        ("Tesla M40 24GB", "m40-24gb"),
        ("NVIDIA RTX PRO 5000 Blackwell", "rtxpro5000-48gb"),
        ("NVIDIA RTX PRO 5000 72GB Blackwell", "rtxpro5000-72gb"),
        ("NVIDIA RTX PRO 4500 Blackwell", "rtxpro4500"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090d"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090-laptop"),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "rtx3080ti-laptop"),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", "rtx5070ti-laptop"),
        ("GeForce RTX 3060 Mobile", "rtx3060-laptop"),
        ("4070 notebook", "rtx4070-laptop"),
        ("rtx4090 laptop", "rtx4090-laptop"),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx"),
        ("7900xtx", "rx7900xtx"),
        ("7900 XT", "rx7900xt"),
        ("AMD Radeon RX 9070 XT", "rx9070xt"),
        ("rx9070", "rx9070"),
        ("AMD Radeon PRO W7900", "w7900"),
        ("pro w7900", "w7900"),
        ("AMD Radeon AI PRO R9700", "r9700"),
        ("Radeon Pro R9700", "r9700"),
        ("6800xt", "rx6800xt"),
        ("AMD Radeon RX 6900 XT", "rx6900xt"),
        ("Intel(R) Arc(TM) A770 Graphics", "a770-16gb"),
        ("arc a770", "a770-16gb"),
        ("a770", "a770-16gb"),
        ("Intel(R) Arc(TM) B580 Graphics", "b580"),
        ("Intel(R) Data Center GPU Max 1550", "max1550-tile"),
        ("max 1100", "max1100"),
        ("Intel Gaudi 2", "gaudi2"),
        ("Gaudi3", "gaudi3"),
        ("HL-325L", "gaudi3"),
    ],
)
def test_find_takes_names_as_people_and_drivers_write_them(text, name):
    assert find_card(text).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(
            (name, name)
            for name in ("p40", "t4", "l4", "l40", "l40s", "a10", "a10g", "a40", "b200", "b300")
        ),
        *((f"rtx{number}", f"rtx{number}") for number in ("3090", "4090", "5090", "2080ti")),
        *((number, f"rtx{number}") for number in ("3090", "4090", "5090", "2080ti")),
        *((name, name) for name in ("mi60", "mi100", "mi210", "mi300x", "mi325x", "mi350x")),
        ("1080ti", "gtx1080ti"),
        ("titan-rtx", "titanrtx"),
        ("a6000", "rtxa6000"),
        ("rtx a6000", "rtxa6000"),
        ("rtx-8000", "quadro-rtx8000"),
        ("a16", "a16-gpu"),
        ("h200", "h200-141gb-sxm"),
        ("h100-sxm", "h100-80gb-sxm"),
        ("h100-pcie", "h100-80gb-pcie"),
        ("a100-80g-sxm4", "a100-80gb-sxm"),
        ("a100 SXM 40GB", "a100-40gb-sxm"),
        ("gb200", "gb200-gpu"),
        ("mi250", "mi250-gcd"),
        ("mi250x", "mi250x-gcd"),
        ("rtx 3090 24 GB", "rtx3090"),
        ("RTX 3060 12GB", "rtx3060"),
        ("t4-16g", "t4"),
        ("h200 SXM5 141GB", "h200-141gb-sxm"),
        ("a100-40", "a100-40gb-sxm"),
        ("a100 80", "a100-80gb-sxm"),
        ("a100-sxm4-40", "a100-40gb-sxm"),
        ("v100-16", "v100-16gb-sxm"),
        ("v100-32", "v100-32gb-sxm"),
        ("m40 24gb", "m40-24gb"),
        ("mi50-32", "mi50-32gb"),
        ("2080 Ti 22GB", "rtx2080ti-22gb"),
        ("RTX 3080 20 GB", "rtx3080-20gb"),
        ("3060 8gb", "rtx3060-8gb"),
        ("4090 48GB", "rtx4090-48gb"),
        ("4090-48", "rtx4090-48gb"),
        ("pro 5000 72gb", "rtxpro5000-72gb"),
        ("pro 6000 server", "rtxpro6000-server"),
        ("3080 laptop 16gb", "rtx3080-laptop-16gb"),
        ("7900 xtx 24gb", "rx7900xtx"),
    ],
)
def test_what_is_unique_may_be_left_out(text, name):
    assert find_card(text).name == name


@every_card
def test_every_name_and_alias_finds_its_card(card):
    assert all(find_card(text) is card for text in (card.name, *card.aliases))


def suggestions(error):
    return error.fix.removeprefix("say one of: ").split(", ")


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("rtx3091", {"rtx3090"}),
        ("rtx4009", {"rtx4090"}),
        ("mi300", {"mi300x"}),
        ("m60", {"m40-12gb"}),
        ("3060 10gb", {"rtx3060"}),  # another card
        ("titanx", {"titanx-pascal"}),  # there was one before Pascal
    ],
)
def test_an_unknown_name_is_told_its_neighbours(text, suggested):
    with raises(InputError, code="card-unknown", what=text) as caught:
        find_card(text)
    names = suggestions(caught.value)
    assert suggested <= set(names) <= {card.name for card in CARDS}
    assert "Pascal" in caught.value.why


@pytest.mark.parametrize("text", ["k80", "Tesla K80", "K40c", "k20x"])
def test_a_card_too_old_for_torch_is_told_so(text):
    with raises(InputError, code="card-unknown", what=text) as caught:
        find_card(text)
    assert "compute capability 5.0" in caught.value.why
    assert "leave it out" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "taken", "others"),
    [
        ("a100", "a100-80gb-sxm", ["a100-40gb-sxm", "a100-80gb-pcie", "a100-40gb-pcie"]),
        ("a100-80gb", "a100-80gb-sxm", ["a100-80gb-pcie"]),
        ("a100-40", "a100-40gb-sxm", ["a100-40gb-pcie"]),
        ("a800", "a800-80gb-sxm", ["a800-80gb-pcie", "a800-40gb-pcie"]),
        ("v100", "v100-16gb-sxm", ["v100-32gb-sxm", "v100-16gb-pcie", "v100-32gb-pcie"]),
        ("v100-16", "v100-16gb-sxm", ["v100-16gb-pcie"]),
        ("p100", "p100-16gb-pcie", ["p100-16gb-sxm", "p100-12gb-pcie"]),
        ("h100", "h100-80gb-sxm", ["h100-80gb-pcie", "h100-94gb-nvl"]),
        ("h800", "h800-80gb-sxm", ["h800-80gb-pcie"]),
        ("h20", "h20-96gb", ["h20-141gb"]),
        ("gh200", "gh200-96gb", ["gh200-144gb"]),
        ("m40", "m40-12gb", ["m40-24gb"]),
        ("gtx1060", "gtx1060-6gb", ["gtx1060-3gb"]),
        ("3080", "rtx3080-10gb", ["rtx3080-12gb"]),
        ("RTX A2000", "rtxa2000-6gb", ["rtxa2000-12gb"]),
        ("RTX 4060 Ti", "rtx4060ti-8gb", ["rtx4060ti-16gb"]),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti-8gb", ["rtx4060ti-16gb"]),
        ("3080 laptop", "rtx3080-laptop-8gb", ["rtx3080-laptop-16gb"]),
        ("rtx pro 6000", "rtxpro6000-workstation", ["rtxpro6000-maxq", "rtxpro6000-server"]),
        ("rtx pro 5000", "rtxpro5000-48gb", ["rtxpro5000-72gb"]),
        ("mi50", "mi50-16gb", ["mi50-32gb"]),
        # nothing else is meant by these
        ("h200", "h200-141gb-sxm", []),
        ("4090", "rtx4090", []),
        ("2080ti", "rtx2080ti", []),
        ("NVIDIA GeForce RTX 4090", "rtx4090", []),
        ("a100-40gb-pcie", "a100-40gb-pcie", []),
    ],
)
def test_a_name_of_several_forms_means_the_usual_one(text, taken, others):
    assert find_card(text).name == taken
    assert [card.name for card in find_other_forms(text)] == others


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("rtx6000", ["quadro-rtx6000", "rtx6000-ada"]),
        ("rtx4000", ["quadro-rtx4000", "rtx4000-sff-ada", "rtx4000-ada"]),
    ],
)
def test_a_name_of_several_architectures_is_never_guessed(text, choices):
    with raises(InputError, code="card-ambiguous") as caught:
        find_card(text)
    assert suggestions(caught.value) == choices


@pytest.mark.parametrize(
    ("product", "mib", "name"),
    [
        ("NVIDIA GeForce RTX 3080", 10240, "rtx3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 12288, "rtx3080-12gb"),
        ("NVIDIA GeForce RTX 3080", 20480, "rtx3080-20gb"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090"),
        ("NVIDIA GeForce RTX 4090", 49140, "rtx4090-48gb"),
        ("NVIDIA GeForce RTX 3060", 8192, "rtx3060-8gb"),
        ("NVIDIA GeForce RTX 3060", 12288, "rtx3060"),
        ("NVIDIA GeForce RTX 2080 Ti", 22528, "rtx2080ti-22gb"),
        ("AMD Radeon Instinct MI50", 32752, "mi50-32gb"),
        ("NVIDIA L20", 46068, "l20"),
    ],
)
def test_memory_tells_cards_of_one_product_apart(product, mib, name):
    assert find_card(product, mib * MIB).name == name
    assert find_product(product, mib * MIB).name == name


def test_a_product_of_unknown_memory_is_unclear():
    assert find_product("NVIDIA GeForce RTX 3080", 16 * GIB) is None
    assert find_product("NVIDIA GeForce RTX 3090", 16 * GIB).name == "rtx3090"  # there is one
    assert find_product("3090", 24 * GIB) is None  # no driver says that


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("rtx4090", "RTX 4090"),
        ("rtx4090-48gb", "RTX 4090 48GB"),
        ("rtx3060", "RTX 3060 12GB"),
        ("rtx4090-laptop", "RTX 4090 Laptop GPU"),
        ("rx7900xtx", "RX 7900 XTX"),
        ("a770-16gb", "Arc A770"),
        ("max1550-tile", "Max 1550"),
        ("a100-80gb-sxm", "A100 SXM4 80GB"),
        ("gaudi2", "Gaudi 2"),
        ("unknown", "unknown"),
    ],
)
def test_short_names_for_tables(name, short):
    assert shorten_product(name) == short


@pytest.mark.parametrize("text", ["two rtx4090", "2  rtx4090", "a 4090"])
def test_a_number_has_its_form(text):
    with raises(InputError, code="card-unknown") as caught:
        find_card(text)
    first, rest = text.split()
    assert caught.value.fix == f"if '{first}' is how many, write '2x {rest}'"


@pytest.mark.parametrize("text", ["", "nvidia", "?!"])
def test_a_name_without_content_is_told_an_example(text):
    with raises(InputError, code="card-unknown"):
        find_card(text)


def test_cards_are_frozen_and_strict():
    with pytest.raises(ValidationError):
        find_card("p40").memory_bytes = 1
    with pytest.raises(ValidationError, match="bandwidth"):
        DeviceLink(kind=DeviceLinkKind.NVLINK)


def test_pcie_counts_lanes_and_generations():
    assert PcieLink(kind="pcie", generation=4, lanes=16).bandwidth == pytest.approx(
        31.5e9, rel=1e-3
    )
    assert PcieLink(kind="pcie", generation=3, lanes=8).bandwidth == pytest.approx(7.88e9, rel=1e-3)
    assert PcieLink(kind="pcie", generation=6, lanes=16).bandwidth == 121e9


def test_the_catalogue_needs_no_torch():
    code = "import sys; from gpumix.hardware.estimates.gpu_catalogue import find_card; "
    code += "find_card('p40'); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was imported"
