"""The catalogue: every card has a source and obeys the laws of its architecture; find() helps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from gpumix.hardware.catalogue import DeviceLink, DeviceLinkKind, PcieLink, find, load
from gpumix.spec.errors import InputError

GIB = 2**30
GB = 10**9
CARDS = load()
ARCHITECTURES = {
    "pascal": {"6.0", "6.1"},
    "volta": {"7.0"},
    "turing": {"7.5"},
    "ampere": {"8.0", "8.6"},
    "ada": {"8.9"},
    "hopper": {"9.0"},
    "blackwell": {"10.0", "12.0"},
    "gcn5": {"gfx906"},
    "cdna": {"gfx908"},
    "cdna2": {"gfx90a"},
    "cdna3": {"gfx942"},
    "cdna4": {"gfx950"},
}
CORES_PER_SM = {"volta": 64, "turing": 64}  # 128 elsewhere
VENDOR_SITES = ("nvidia.com", "amd.com", "awsstatic.com")

every_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)


def of(*architectures):
    return [card for card in CARDS if card.architecture in architectures]


def test_there_are_many_cards():
    assert len(CARDS) >= 80
    assert {card.architecture for card in CARDS} == set(ARCHITECTURES)


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
    assert url.hostname.endswith(VENDOR_SITES)


@every_card
def test_target_belongs_to_the_architecture(card):
    target = card.compute_capability or card.gfx_target
    assert target in ARCHITECTURES[card.architecture]
    assert card.vendor == ("amd" if target.startswith("gfx") else "nvidia")


@every_card
def test_sizes_are_plausible(card):
    assert 2 * GIB <= card.memory_bytes <= 300 * GIB
    assert 50 * GB <= card.memory_bandwidth <= 10_000 * GB
    assert 3e12 <= card.flops.fp32 <= 200e12
    assert card.tdp_watts is None or 40 <= card.tdp_watts <= 1500


@every_card
def test_narrower_numbers_are_not_slower(card):
    rates = card.flops
    order = [rate for rate in (rates.fp32, rates.tf32, rates.bf16, rates.fp8) if rate is not None]
    assert order == sorted(order)
    if rates.fp16 is not None:
        assert rates.fp32 <= rates.fp16
        assert (rates.bf16 or 0) <= rates.fp16
        assert rates.fp16 <= (rates.fp8 or rates.fp16)


@every_card
def test_matrix_units_halve_their_rate_with_every_doubling_of_the_number(card):
    rates = card.flops
    for wide, narrow in ((rates.tf32, rates.fp16), (rates.fp16, rates.fp8)):
        if wide and narrow:
            assert narrow == pytest.approx(2 * wide, rel=0.03)


@pytest.mark.parametrize("card", [c for c in CARDS if c.derived], ids=lambda c: c.name)
def test_a_derived_rate_says_from_what_and_follows_from_it(card):
    assert card.note
    clock = re.search(r"(\d+) SMs at (\d+) MHz", card.note)
    if clock is not None:
        cores = int(clock[1]) * CORES_PER_SM.get(card.architecture, 128)
        assert card.flops.fp32 == pytest.approx(cores * 2 * int(clock[2]) * 1e6, rel=0.006)


@pytest.mark.parametrize("card", of("pascal", "volta", "turing", "gcn5"), ids=lambda c: c.name)
def test_old_cards_have_neither_bf16_nor_tf32_nor_fp8(card):
    assert (card.flops.bf16, card.flops.tf32, card.flops.fp8) == (None, None, None)
    assert card.matrix_units == (card.architecture in {"volta", "turing"})


@pytest.mark.parametrize("card", of("ampere", "cdna", "cdna2"), ids=lambda c: c.name)
def test_cards_before_ada_and_cdna3_have_no_fp8(card):
    assert card.flops.bf16 is not None
    assert card.flops.fp8 is None


@every_card
def test_only_geforce_halves_with_fp32_accumulate(card):
    titan = "TITAN" in card.product
    assert card.fp32_accumulate_halved == (
        card.family == "geforce" and card.matrix_units and not titan
    )


@pytest.mark.parametrize("card", of("turing", "ampere", "ada", "blackwell"), ids=lambda c: c.name)
def test_tensor_cores_have_the_ratio_of_their_architecture(card):
    if card.compute_capability in {"8.0", "10.0"} or card.name in {"a10g", "l40"}:
        return  # other SMs, or rates that the vendor states lower
    ratio = 8 if card.architecture == "turing" else 4
    ratio /= 1 + card.fp32_accumulate_halved
    assert card.flops.fp16 == pytest.approx(ratio * card.flops.fp32, rel=0.02)


@every_card
def test_device_links_are_plausible(card):
    link = card.device_link
    if link is not None and link.kind is not DeviceLinkKind.NONE:
        assert 20 * GB <= link.bandwidth <= 1000 * GB
        assert link.bandwidth < card.memory_bandwidth
        assert link.kind.startswith("nvlink") == (card.vendor == "nvidia")


def test_rates_of_well_known_cards():
    a100, rtx3090 = find("a100-80gb-sxm"), find("rtx3090")
    assert (a100.flops.bf16, a100.flops.tf32, a100.memory_bandwidth) == (312e12, 156e12, 2039 * GB)
    assert (a100.memory_bytes, a100.device_link.bandwidth) == (80 * GIB, 300 * GB)
    assert rtx3090.flops.bf16 == pytest.approx(71e12, rel=0.005)
    assert find("h100-80gb-sxm").flops.fp16 == pytest.approx(989e12, rel=0.005)  # not 1979, sparse
    assert find("rtx4090").flops.fp16 == pytest.approx(165.2e12, rel=0.005)  # not 330, fp16 sums
    assert find("p40").flops.fp16 is None
    assert find("mi250x").memory_bytes == 64 * GIB  # one die of the two


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
    ],
)
def test_find_takes_names_as_people_and_drivers_write_them(text, name):
    assert find(text).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(
            (name, name)
            for name in ("p40", "t4", "l4", "l40", "l40s", "a10", "a10g", "a40", "b200")
        ),
        *((f"rtx{number}", f"rtx{number}") for number in ("3090", "4090", "5090", "2080ti")),
        *((number, f"rtx{number}") for number in ("3090", "4090", "5090", "2080ti")),
        *((name, name) for name in ("mi60", "mi100", "mi210", "mi300x", "mi325x", "mi355x")),
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
    ],
)
def test_what_is_unique_may_be_left_out(text, name):
    assert find(text).name == name


@every_card
def test_every_name_and_alias_finds_its_card(card):
    assert all(find(text) is card for text in (card.name, *card.aliases))


def suggestions(error):
    return error.fix.removeprefix("say one of: ").split(", ")


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("rtx3091", {"rtx3090"}),
        ("rtx4009", {"rtx4090"}),
        ("mi300", {"mi300x"}),
        ("m40", {"p40", "a40"}),
        ("k80", set()),
        ("titanx", {"titanx-pascal"}),  # there was one before Pascal
    ],
)
def test_an_unknown_name_is_told_its_neighbours(text, suggested):
    with pytest.raises(InputError, match=f"no card '{text}'") as caught:
        find(text)
    names = suggestions(caught.value)
    assert suggested <= set(names) <= {card.name for card in CARDS}
    assert "Pascal" in caught.value.why


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("a100", ["a100-40gb-sxm", "a100-80gb-sxm", "a100-40gb-pcie", "a100-80gb-pcie"]),
        ("a100-80gb", ["a100-80gb-sxm", "a100-80gb-pcie"]),
        ("v100", ["v100-16gb-sxm", "v100-32gb-sxm", "v100-16gb-pcie", "v100-32gb-pcie"]),
        ("p100", ["p100-16gb-sxm", "p100-16gb-pcie", "p100-12gb-pcie"]),
        ("h100", ["h100-80gb-sxm", "h100-80gb-pcie", "h100-94gb-nvl"]),
        ("gh200", ["gh200-96gb", "gh200-144gb"]),
        ("3080", ["rtx3080-10gb", "rtx3080-12gb"]),
        ("RTX A2000", ["rtxa2000-6gb", "rtxa2000-12gb"]),
        ("rtx6000", ["quadro-rtx6000", "rtx6000-ada"]),
        ("RTX 4060 Ti", ["rtx4060ti-8gb", "rtx4060ti-16gb"]),
        ("NVIDIA GeForce RTX 4060 Ti", ["rtx4060ti-8gb", "rtx4060ti-16gb"]),
        ("rtxpro6000", ["rtxpro6000-workstation", "rtxpro6000-maxq", "rtxpro6000-server"]),
        ("mi50", ["mi50-16gb", "mi50-32gb"]),
    ],
)
def test_a_name_of_several_cards_is_never_guessed(text, choices):
    with pytest.raises(InputError, match="fits several cards") as caught:
        find(text)
    assert suggestions(caught.value) == choices


@pytest.mark.parametrize("text", ["", "nvidia", "?!"])
def test_a_name_without_content_is_told_an_example(text):
    with pytest.raises(InputError, match="no card"):
        find(text)


def test_cards_are_frozen_and_strict():
    with pytest.raises(ValidationError):
        find("p40").memory_bytes = 1
    with pytest.raises(ValidationError, match="a link has a bandwidth"):
        DeviceLink(kind=DeviceLinkKind.NVLINK)


def test_pcie_counts_lanes_and_generations():
    assert PcieLink(kind="pcie", generation=4, lanes=16).bandwidth == pytest.approx(
        31.5e9, rel=1e-3
    )
    assert PcieLink(kind="pcie", generation=3, lanes=8).bandwidth == pytest.approx(7.88e9, rel=1e-3)


def test_the_catalogue_needs_no_torch():
    code = "import sys; from gpumix.hardware.catalogue import find; find('p40'); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was imported"
