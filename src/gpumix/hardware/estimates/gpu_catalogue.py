"""Datasheet catalogue: memory, rates and links of GPUs, present or not.

Used for planning before anything is measured; a measured profile always takes precedence. The data
is in `catalogue.toml` next to this file; pure, on top of `schema`, without torch.
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

from gpumix.schema.cluster.cluster import Accelerator
from gpumix.schema.errors import InputError
from gpumix.schema.files import read_text
from gpumix.schema.units import Bytes, FlopRate
from gpumix.schema.value import Value

_DATA = Path(__file__).with_name("catalogue.toml")
_IGNORED_WORDS = {
    "nvidia",
    "geforce",
    "tesla",
    "amd",
    "radeon",
    "instinct",
    "intel",
    "r",
    "arc",
    "tm",
    "graphics",
    "gpu",
    "data",
    "center",
    "centre",
    "generation",
    "blackwell",
    "edition",
}
_SYNONYMS = {"mobile": "laptop", "notebook": "laptop"}
# Words users may leave out of a name; the rest is the model.
_QUALIFIER = re.compile(r"\d+gb|sxm|pcie|nvl|gcd|tile|quadro|ada|sff|workstation|maxq|server")
_MEMORY = re.compile(r"\d+gb")
_BARE_MEMORY = re.compile(r"[\s_-]\d{1,3}$")  # 'a100-40'
_SERIES = re.compile(r"^(?:rtx|gtx|rx)(?=a?\d|pro\d)")
_KEPLER = re.compile(r"k\d0[a-z]?")  # the Tesla K10 to K80
_MEMORY_TOLERANCE = 0.1  # drivers report a little less than is sold
_SUGGESTED_CARDS = 6  # names in an error
_MIN_SIMILARITY = 0.5  # similarity for difflib, below the default: names are short
# Bits per second of a lane: transfers minus coding, from PCIe 6.0 on minus error correction.
_PCIE_LANE = {3: 8e9 * 128 / 130, 4: 16e9 * 128 / 130, 5: 32e9 * 128 / 130, 6: 64e9 * 242 / 256}

ByteRate = Annotated[
    Bytes,
    BeforeValidator(lambda value: value.removesuffix("/s") if isinstance(value, str) else value),
]
"""Bytes per second; a file may say "936 GB/s"."""


class DeviceLinkKind(StrEnum):
    """Types of direct links between equal GPUs, bypassing the host."""

    NONE = "none"
    NVLINK = "nvlink"
    NVLINK_BRIDGE = "nvlink-bridge"  # sold separately, joins two GPUs (four H200 NVL)
    INFINITY_FABRIC = "infinity-fabric"
    INFINITY_FABRIC_BRIDGE = "infinity-fabric-bridge"  # sold separately, joins two or four GPUs
    ETHERNET = "ethernet"  # the card's own ports, to all others of a host


class PcieLink(Value):
    """The GPU's PCIe slot; the host may provide fewer lanes or an older generation."""

    kind: Literal["pcie"]
    generation: Literal[3, 4, 5, 6]
    lanes: Literal[4, 8, 16]

    @property
    def bandwidth(self) -> float:
        """Bytes/s in one direction, before packet overhead."""
        return _PCIE_LANE[self.generation] * self.lanes / 8


class CoherentLink(Value):
    """A link to the CPU of the same module."""

    kind: Literal["nvlink-c2c"]
    bandwidth: ByteRate
    """Bytes/s in one direction."""


class DeviceLink(Value):
    """Sum of all links from a GPU to its peers."""

    kind: DeviceLinkKind
    bandwidth: ByteRate = 0
    """Bytes/s in one direction, all links together; 0 without links."""

    @model_validator(mode="after")
    def _has_bandwidth_or_is_none(self) -> DeviceLink:
        if (self.kind is DeviceLinkKind.NONE) != (self.bandwidth == 0):
            raise ValueError("a link has a bandwidth, no link has none")
        return self


class Rates(Value):
    """Dense FLOP/s of matrix products; None means unsupported in hardware or unknown.

    On matrix units the 16-bit and 8-bit rates use fp32 accumulation. `fp32` is IEEE fp32, on the
    general units of NVIDIA and on the matrix units of CDNA.
    """

    fp32: FlopRate
    tf32: FlopRate | None = None
    fp16: FlopRate | None = None
    bf16: FlopRate | None = None
    fp8: FlopRate | None = None


class Card(Value):
    """A product as described by the vendor; for a board with several GPUs, a single GPU."""

    name: str
    aliases: tuple[str, ...] = ()
    product: str
    """Name reported by the driver, if known; products with two memory sizes share a name."""
    vendor: Literal["nvidia", "amd", "intel"]
    family: Literal["data-centre", "workstation", "geforce", "radeon", "arc"]
    architecture: str
    compute_capability: str | None = None
    """NVIDIA only, such as '8.6'."""
    gfx_target: str | None = None
    """AMD only, such as 'gfx90a'."""
    xe_target: str | None = None
    """Intel's GPUs only, as torch names its builds for them: 'bmg'; Gaudi has none."""
    memory_bytes: Bytes
    """GiB as sold; the driver reports some hundred MiB less."""
    modified: bool = False
    """The memory was replaced by others than the vendor: meant only where its size is said."""
    shares_host_memory: bool = False
    """The memory is the host's own: what is kept on the host takes of it too."""
    ecc_in_memory: bool = False
    """Shipped with ECC enabled and stored in memory: data-center GPUs without HBM."""
    memory_bandwidth: ByteRate
    matrix_units: bool
    """Units for 16-bit products with fp32 sums: tensor or matrix cores, dot products. Without them
    `flops.fp16` is general arithmetic."""
    flops: Rates
    fp32_accumulate_halved: bool = False
    """fp16 products with fp16 accumulation are twice as fast as `flops.fp16`: most GeForce."""
    derived: bool = False
    """Rates derived from the vendor's figures, not stated directly; `note` explains."""
    host_link: Annotated[PcieLink | CoherentLink, Field(discriminator="kind")]
    """A GPU's part of the host link, if GPUs of a board or module share it."""
    device_link: DeviceLink | None = None
    """None: not known as a single number; a GPU without links has kind 'none'."""
    tdp_watts: int | None = Field(default=None, gt=0)
    note: str = ""
    source: str

    @property
    def visible_bytes(self) -> int:
        """Memory visible to programs: ECC stored in memory takes a sixteenth."""
        return self.memory_bytes * 15 // 16 if self.ecc_in_memory else self.memory_bytes

    @property
    def target(self) -> str:
        """What kernels are built for; the architecture where nothing narrower is named."""
        narrow = self.compute_capability or self.gfx_target or self.xe_target
        return narrow or self.architecture

    @property
    def accelerator(self) -> Accelerator:
        """torch's type of this device."""
        if self.vendor != "intel":
            return "cuda"
        return "xpu" if self.xe_target else "hpu"

    @model_validator(mode="after")
    def _has_the_target_of_its_vendor(self) -> Card:
        targets = {
            "nvidia": self.compute_capability,
            "amd": self.gfx_target,
            "intel": self.xe_target,
        }
        own = targets.pop(self.vendor)
        if any(targets.values()) or (own is None and self.vendor != "intel"):
            raise ValueError(
                "NVIDIA has a compute capability, AMD a gfx target, Intel's GPUs an Xe target"
            )
        return self


@cache
def load_cards() -> tuple[Card, ...]:
    """Return all cards, in file order."""
    data = tomllib.loads(read_text(_DATA))
    return tuple(
        _card(group, card, data["sources"]) for group in data["group"] for card in group["card"]
    )


def _card(group: dict[str, Any], own: dict[str, Any], sources: dict[str, str]) -> Card:
    """Build a card from the `own` fields on top of the fields of the group."""
    fields = {key: value for key, value in group.items() if key != "card"} | own
    fields["flops"] = {kind: rate * 1e12 for kind, rate in fields.pop("tflops").items()}
    fields["source"] = sources.get(fields["source"], fields["source"])
    notes = (own.get("note"), group.get("note"))
    fields["note"] = "; ".join(note for note in notes if note)
    return Card.model_validate(fields)


def find_card(name: str, memory_bytes: int | None = None) -> Card:
    """Find a card by name, alias, or product name as reported by the driver.

    Case, spaces, dashes and words such as 'NVIDIA' and 'GeForce' are ignored. Parts may be omitted:
    'rtx3090' or '3090', 'h100-pcie', 'a100-40'. Of several forms of one card the usual one is
    meant, which `find_other_forms` tells; cards of different architectures are never guessed.

    Args:
        memory_bytes: as reported by the driver, to tell forms apart.

    Raises:
        InputError: no card or several cards match; lists the nearest names.
    """
    fits = _find_fits(name)
    usual = _choose_form(fits, memory_bytes)
    if usual is not None:
        return usual
    key = _normalize_name(name)
    near = [card.name for card in fits] or _nearest(key)
    fix = f"say one of: {', '.join(near)}" if near else "give a name such as 'rtx3090'"
    first, _, rest = name.strip().partition(" ")
    if _choose_form(_find_fits(rest), None) is not None:
        fix = f"if '{first}' is how many, write '2x {rest.strip()}'"
    why = (
        "it has NVIDIA's cards from Pascal on and the Tesla M40, AMD's Instinct from MI50 on and "
        "large Radeons from RX 6800 XT on, and Intel's Arc, Max and Gaudi"
    )
    if _KEPLER.fullmatch(key):
        why = "it is a Kepler, and torch has kernels from compute capability 5.0 on (CUDA 12)"
        fix = "leave it out: this torch cannot use it"
    raise InputError(
        f"'{name}' fits several cards" if fits else f"the catalogue has no card '{name}'",
        code="card-ambiguous" if fits else "card-unknown",
        why="" if fits else why,
        fix=fix,
    )


def find_product(product: str, memory_bytes: int) -> Card | None:
    """Return the card that its driver calls `product`, by memory where several are called so; None
    if it is unknown or unclear."""
    fits = _products().get(product.strip().lower(), ())
    near = fits if len(fits) == 1 else _with_memory(fits, memory_bytes)
    return near[0] if len(near) == 1 else None


def find_other_forms(name: str) -> tuple[Card, ...]:
    """Return the other cards that a name fits, of which `find_card` takes the usual one."""
    taken = find_card(name)
    return tuple(card for card in _leave_out_modified(_find_fits(name)) if card is not taken)


def _find_fits(name: str) -> tuple[Card, ...]:
    """Return all cards that a name may mean, in file order: the usual form of a card first."""
    spellings, key = _index_spellings(), _normalize_name(name)
    fits = _products().get(name.strip().lower()) or spellings.get(key, ())
    if not fits and _BARE_MEMORY.search(name.strip()):
        fits = spellings.get(f"{key}gb", ())
    return fits


def _choose_form(fits: tuple[Card, ...], memory_bytes: int | None) -> Card | None:
    """Return the card meant, or the usual one of its forms; None for cards that differ in more."""
    if memory_bytes is not None:
        fits = _with_memory(fits, memory_bytes) or fits
    forms = _leave_out_modified(fits)
    return forms[0] if len({card.target for card in forms}) == 1 else None


def _with_memory(fits: tuple[Card, ...], memory_bytes: int) -> tuple[Card, ...]:
    """Return the cards with this much memory, as a driver reports it."""
    off = {card.name: abs(memory_bytes / card.visible_bytes - 1) for card in fits}
    least = min(off.values(), default=1.0)
    if least > _MEMORY_TOLERANCE:
        return ()
    return tuple(card for card in fits if off[card.name] == least)


def _leave_out_modified(fits: tuple[Card, ...]) -> tuple[Card, ...]:
    return tuple(card for card in fits if not card.modified) or fits


_BRANDS = re.compile(
    r"\b(?:NVIDIA|AMD|Intel|GeForce|Tesla|Radeon|Instinct|Data Center GPU|Graphics|Generation|"
    r"Edition)\b|\((?:R|TM)\)"
)


def shorten_product(class_name: str) -> str:
    """Return the usual short name of a device class: 'RTX 4090' for 'rtx4090', 'A100 SXM4 80GB' for
    'a100-80gb-sxm'. Names that the catalogue does not know are returned unchanged."""
    card = _names().get(class_name)
    if card is None:
        return class_name
    short = " ".join(_BRANDS.sub("", card.product).replace("-", " ").split())
    alike = _products()[card.product.lower()]
    several = card.modified or len(_leave_out_modified(alike)) > 1
    return f"{short} {card.memory_bytes >> 30}GB" if several else short


@cache
def _names() -> dict[str, Card]:
    return {card.name: card for card in load_cards()}


@cache
def _products() -> dict[str, tuple[Card, ...]]:
    """Return cards by exact product name, which separates an RTX A2000 from the 12 GB version."""
    return _group_by_key([(card.product.lower(), card) for card in load_cards()])


@cache
def _index_spellings() -> dict[str, tuple[Card, ...]]:
    """Return cards by spelling; full names and aliases take precedence over short forms."""
    cards = load_cards()
    product = _group_by_key([(_normalize_name(card.product), card) for card in cards])
    short = _group_by_key([(key, card) for card in cards for key in _short_forms(card)])
    full = _group_by_key(
        [(_normalize_name(text), card) for card in cards for text in (card.name, *card.aliases)]
    )
    return product | short | full


def _group_by_key(pairs: list[tuple[str, Card]]) -> dict[str, tuple[Card, ...]]:
    found: dict[str, dict[str, Card]] = {}
    for key, card in pairs:
        found.setdefault(key, {})[card.name] = card
    return {key: tuple(cards.values()) for key, cards in found.items()}


def _short_forms(card: Card) -> Iterator[str]:
    """Yield spellings of a card's name with any subset of its qualifiers in any order, and without
    'rtx' or 'rx'. The memory size is a qualifier too, even if absent from the name."""
    words = _words(card.name)
    if not any(_MEMORY.fullmatch(word) for word in words):
        words.append(f"{card.memory_bytes / 2**30:g}gb")
    model = "".join(word for word in words if not _QUALIFIER.fullmatch(word))
    qualifiers = [word for word in words if _QUALIFIER.fullmatch(word)]
    for count in range(len(qualifiers) + 1):
        for some in permutations(qualifiers, count):
            key = model + "".join(some)
            yield from (key, _SERIES.sub("", key))


def _normalize_name(text: str) -> str:
    return "".join(_words(text))


def _words(text: str) -> list[str]:
    """Split a name into normalized significant words: '80g' becomes '80gb', 'SXM4' becomes
    'sxm'."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    words = [
        re.sub(r"^(\d+)(?:g|gib)$", r"\1gb", word) for word in words if word not in _IGNORED_WORDS
    ]
    return [_SYNONYMS.get(word, re.sub(r"^sxm\d$", "sxm", word)) for word in words]


def _nearest(key: str) -> list[str]:
    """Return similar card names: names starting with `key` first, then similar spellings."""
    if not key:
        return []
    spellings = _index_spellings()
    begins = [spelling for spelling in spellings if spelling.startswith(key)]
    alike = get_close_matches(key, spellings, n=_SUGGESTED_CARDS, cutoff=_MIN_SIMILARITY)
    alike.sort(key=lambda spelling: sorted(spelling) != sorted(key))  # swapped digits first
    cards = (card.name for spelling in (*begins, *alike) for card in spellings[spelling])
    return list(dict.fromkeys(cards))[:_SUGGESTED_CARDS]
