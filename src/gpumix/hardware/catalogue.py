"""What vendors say of their cards: memory, rates and links of GPUs that need not be here.

For planning before there is anything to measure; a measured profile always counts for more.
The facts are in `catalogue.toml` beside this file; pure, on top of `spec`, without torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from gpumix.spec.base import Value
from gpumix.spec.errors import InputError
from gpumix.spec.files import read_text
from gpumix.spec.units import Bytes, FlopRate

_DATA = Path(__file__).with_name("catalogue.toml")
_NOISE = {"nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "generation", "blackwell"}
# What people leave out of a name; the rest of it is the model.
_QUALIFIER = re.compile(r"\d+gb|sxm|pcie|nvl|gpu|gcd|quadro|ada|sff|workstation|maxq|server")
_MEMORY = re.compile(r"\d+gb")
_SERIES = re.compile(r"^(?:rtx|gtx)(?=a?\d)")
_SHOWN = 6  # names in an error
_NEAR = 0.5  # how alike spellings are for difflib, less than its default: names are short
# Bits per second of a lane: transfers less the coding, from PCIe 6.0 on less what corrects errors.
_PCIE_LANE = {3: 8e9 * 128 / 130, 4: 16e9 * 128 / 130, 5: 32e9 * 128 / 130, 6: 64e9 * 242 / 256}

ByteRate = Annotated[
    Bytes,
    BeforeValidator(lambda value: value.removesuffix("/s") if isinstance(value, str) else value),
]
"""Bytes per second; a file may say "936 GB/s"."""


class DeviceLinkKind(StrEnum):
    """How cards of one kind reach each other without the host."""

    NONE = "none"
    NVLINK = "nvlink"
    NVLINK_BRIDGE = "nvlink-bridge"  # sold apart, joins two cards (four of the H200 NVL)
    INFINITY_FABRIC = "infinity-fabric"
    INFINITY_FABRIC_BRIDGE = "infinity-fabric-bridge"  # sold apart, joins two or four cards


class PcieLink(Value):
    """The slot that the card wants; the host may give it fewer lanes or an older generation."""

    kind: Literal["pcie"]
    generation: Literal[3, 4, 5, 6]
    lanes: Literal[4, 8, 16]

    @property
    def bandwidth(self) -> float:
        """Bytes/s in one direction, before the overhead of packets."""
        return _PCIE_LANE[self.generation] * self.lanes / 8


class CoherentLink(Value):
    """A link to the CPU of the same module."""

    kind: Literal["nvlink-c2c"]
    bandwidth: ByteRate
    """Bytes/s in one direction."""


class DeviceLink(Value):
    """The sum of all links from one card to its like."""

    kind: DeviceLinkKind
    bandwidth: ByteRate = 0
    """Bytes/s in one direction, all links together; 0 if there are none."""

    @model_validator(mode="after")
    def _has_bandwidth_or_is_none(self) -> DeviceLink:
        if (self.kind is DeviceLinkKind.NONE) != (self.bandwidth == 0):
            raise ValueError("a link has a bandwidth, no link has none")
        return self


class Rates(Value):
    """Dense FLOP/s of matrix products; None is not supported in hardware or not known.

    On matrix units the 16-bit and 8-bit rates are with fp32 accumulate. `fp32` is IEEE fp32, on
    the plain units of NVIDIA and on the matrix units of CDNA.
    """

    fp32: FlopRate
    tf32: FlopRate | None = None
    fp16: FlopRate | None = None
    bf16: FlopRate | None = None
    fp8: FlopRate | None = None


class Card(Value):
    """One product as its vendor describes it; for a board of several GPUs, one of them."""

    name: str
    aliases: tuple[str, ...] = ()
    product: str
    """What the driver reports, where known; products of two memory sizes share one."""
    vendor: Literal["nvidia", "amd"]
    family: Literal["data-centre", "workstation", "geforce"]
    architecture: str
    compute_capability: str | None = None
    """NVIDIA only, such as '8.6'."""
    gfx_target: str | None = None
    """AMD only, such as 'gfx90a'."""
    memory_bytes: Bytes
    """GiB as sold; the driver reports some hundred MiB less."""
    ecc_in_memory: bool = False
    """Shipped with error correction on, its bits in the memory: data-centre cards without HBM."""
    memory_bandwidth: ByteRate
    matrix_units: bool
    """Tensor or matrix cores; without them `flops.fp16` is plain arithmetic."""
    flops: Rates
    fp32_accumulate_halved: bool = False
    """fp16 products with fp16 accumulate would be twice as fast as `flops.fp16`: most GeForce."""
    derived: bool = False
    """Rates computed from what the vendor states, not stated as such; `note` says from what."""
    host_link: Annotated[PcieLink | CoherentLink, Field(discriminator="kind")]
    """One GPU's part of it, where the GPUs of a board or module share one."""
    device_link: DeviceLink | None = None
    """None: not known as one number; a card without links says kind 'none'."""
    tdp_watts: int | None = Field(default=None, gt=0)
    note: str = ""
    source: str

    @property
    def visible_bytes(self) -> int:
        """The memory that programs see: error correction in it takes a sixteenth."""
        return self.memory_bytes * 15 // 16 if self.ecc_in_memory else self.memory_bytes

    @model_validator(mode="after")
    def _has_the_target_of_its_vendor(self) -> Card:
        nvidia = self.vendor == "nvidia"
        if (self.compute_capability is None) == nvidia or (self.gfx_target is None) != nvidia:
            raise ValueError("NVIDIA has a compute capability, AMD a gfx target")
        return self


@cache
def load() -> tuple[Card, ...]:
    """All cards, in the order of the file."""
    data = tomllib.loads(read_text(_DATA))
    return tuple(
        _card(group, card, data["sources"]) for group in data["group"] for card in group["card"]
    )


def _card(group: dict[str, Any], own: dict[str, Any], sources: dict[str, str]) -> Card:
    """The card that the file says `own` of, on top of what its group shares."""
    fields = {key: value for key, value in group.items() if key != "card"} | own
    fields["flops"] = {kind: rate * 1e12 for kind, rate in fields.pop("tflops").items()}
    fields["source"] = sources.get(fields["source"], fields["source"])
    notes = (own.get("note"), group.get("note"))
    fields["note"] = "; ".join(note for note in notes if note)
    return Card.model_validate(fields)


def find(name: str) -> Card:
    """The card that `name` means: its name, an alias, or the product as the driver reports it.

    Case, spaces, dashes and words such as 'NVIDIA' and 'GeForce' do not count. What is unique may
    be left out: 'rtx3090' or '3090', 'h100-pcie'; never what tells two cards apart, as memory does.

    Raises:
        InputError: there is no such card, or the name fits several; lists the nearest names.
    """
    spellings = _spellings()
    fits = _products().get(name.strip().lower()) or spellings.get(_key(name), ())
    if len(fits) == 1:
        return fits[0]
    near = [card.name for card in fits] or _nearest(_key(name))
    fix = f"say one of: {', '.join(near)}" if near else "give a name such as 'rtx3090'"
    first, _, rest = name.strip().partition(" ")
    if len(spellings.get(_key(rest), ())) == 1:
        fix = f"if '{first}' is how many, write '2x {rest.strip()}'"
    raise InputError(
        f"'{name}' fits several cards" if fits else f"the catalogue has no card '{name}'",
        where="hardware catalogue",
        why="" if fits else "it has NVIDIA's cards from Pascal on, AMD's Instinct from MI50 on",
        fix=fix,
    )


@cache
def _products() -> dict[str, tuple[Card, ...]]:
    """The cards of every product, verbatim: only the driver tells an RTX A2000 from its 12 GB."""
    return _collect([(card.product.lower(), card) for card in load()])


@cache
def _spellings() -> dict[str, tuple[Card, ...]]:
    """The cards of every key; a full name or alias goes before what it is short for."""
    cards = load()
    product = _collect([(_key(card.product), card) for card in cards])
    short = _collect([(key, card) for card in cards for key in _short_forms(card)])
    full = _collect([(_key(text), card) for card in cards for text in (card.name, *card.aliases)])
    return product | short | full


def _collect(pairs: list[tuple[str, Card]]) -> dict[str, tuple[Card, ...]]:
    found: dict[str, dict[str, Card]] = {}
    for key, card in pairs:
        found.setdefault(key, {})[card.name] = card
    return {key: tuple(cards.values()) for key, cards in found.items()}


def _short_forms(card: Card) -> Iterator[str]:
    """Keys of a card's name with some of its qualifiers or none, in any order, and without 'rtx'.
    Its memory is one, which a name that tells no cards apart by it does not have."""
    words = _words(card.name)
    if not any(_MEMORY.fullmatch(word) for word in words):
        words.append(f"{card.memory_bytes / 2**30:g}gb")
    model = "".join(word for word in words if not _QUALIFIER.fullmatch(word))
    qualifiers = [word for word in words if _QUALIFIER.fullmatch(word)]
    for count in range(len(qualifiers) + 1):
        for some in permutations(qualifiers, count):
            key = model + "".join(some)
            yield from (key, _SERIES.sub("", key))


def _key(text: str) -> str:
    return "".join(_words(text))


def _words(text: str) -> list[str]:
    """The words of a name that count, in one spelling: '80g' is '80gb', 'SXM4' is 'sxm'."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    words = [re.sub(r"^(\d+)(?:g|gib)$", r"\1gb", word) for word in words if word not in _NOISE]
    return [re.sub(r"^sxm\d$", "sxm", word) for word in words]


def _nearest(key: str) -> list[str]:
    """Names of cards: first those that begin with what was typed, then those spelt alike."""
    if not key:
        return []
    spellings = _spellings()
    begins = [spelling for spelling in spellings if spelling.startswith(key)]
    alike = get_close_matches(key, spellings, n=_SHOWN, cutoff=_NEAR)
    cards = (card.name for spelling in (*begins, *alike) for card in spellings[spelling])
    return list(dict.fromkeys(cards))[:_SHOWN]
