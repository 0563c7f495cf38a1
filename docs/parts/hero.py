"""The picture of the README: the speeds of an even split, of gpumix and of all devices alone, and
the shares of work and memory of each device. Drawn as SVG from a page of results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

TITLE = "# The picture of the README"
WIDTH, HEIGHT = 880, 268
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
LEFT, BARS, GAP = 8, 384, 28  # pixels: the margin, the width of all bars, between both halves
BAR_HEIGHT, BAR_STEP, BAR_TOP = 34, 66, 66
CARD_WIDTH, CARD_HEIGHT, CARD_GAP = 222, 112, 12
ROOM_FOR_NUMBER = 84


@dataclass(frozen=True)
class Colors:
    """Colours of one scheme; `devices` are those of GPU types, in turn."""

    text: str
    faint: str
    line: str
    track: str
    ours: str
    others: str
    devices: tuple[str, ...]


LIGHT = Colors(
    "#1f2328", "#59636e", "#d1d9e0", "#eaeef2", "#0969da", "#9aa4ae",
    ("#0969da", "#bc4c00", "#1a7f37", "#8250df"),
)  # fmt: skip
DARK = Colors(
    "#f0f6fc", "#9198a1", "#3d444d", "#2a313c", "#4493f8", "#656c76",
    ("#4493f8", "#db6d28", "#3fb950", "#ab7df8"),
)  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """A bar."""

    name: str
    tokens_per_s: float

    @property
    def ours(self) -> bool:
        return self.name == "gpumix"

    @property
    def told(self) -> str:
        return f"{self.tokens_per_s:,.0f}"


@dataclass(frozen=True)
class Share:
    """A card: the parts of the samples and of the training state of a device."""

    device: str
    computed: float
    stored: float

    @property
    def device_class(self) -> str:
        return self.device.rpartition("-")[0]


def read_results(page: str) -> tuple[tuple[Speed, ...], tuple[Share, ...]]:
    """The bars and the cards that a page of results has under `TITLE`."""
    rows = re.findall(r"(?m)^\| (.+) \|$", page.partition(TITLE)[2].partition("\n# ")[0])
    cells = [row.split(" | ") for row in rows]
    speeds = [Speed(row[0], float(row[1].replace(",", ""))) for row in cells if len(row) == 2]
    shares = [
        Share(row[0], *(float(part.removesuffix("%")) / 100 for part in row[1:]))
        for row in cells
        if len(row) == 3 and row[1].endswith("%")
    ]
    assert len(speeds) == 3 and len(shares) == 4, "the page has no picture"
    return tuple(speeds), tuple(shares)


def alternative_text(speeds: Sequence[Speed], shares: Sequence[Share]) -> str:
    """The picture in words."""
    told = ", ".join(f"{one.name} {one.told}" for one in speeds)
    cards = "; ".join(
        f"{one.device} computes {_percent(one.computed)} and stores {_percent(one.stored)}"
        for one in shares
    )
    return (
        f"Tokens/s on four emulated devices of speed 4 : 2 : 1 : 1: {told}. "
        f"Where memory is scarce: {cards}."
    )


def svg(speeds: Sequence[Speed], shares: Sequence[Share], *, dark: bool) -> str:
    """The picture."""
    colors = DARK if dark else LIGHT
    body = "\n".join((*_bars(speeds, colors), *_cards(shares, colors)))
    words = escape(alternative_text(speeds, shares))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}" role="img">\n'
        f"<title>{words}</title>\n{body}\n</svg>\n"
    )


def _percent(part: float) -> str:
    return f"{part * 100:.1f}".removesuffix(".0") + "%"


def _bars(speeds: Sequence[Speed], colors: Colors) -> Iterator[str]:
    most = max(one.tokens_per_s for one in speeds)
    yield _text(
        LEFT, 24, "tokens/s on emulated devices (4 : 2 : 1 : 1)", colors.text, size=15, bold=True
    )
    for number, one in enumerate(speeds):
        y = BAR_TOP + number * BAR_STEP
        width = (BARS - ROOM_FOR_NUMBER) * one.tokens_per_s / most
        fill = colors.ours if one.ours else colors.others
        yield _text(LEFT, y - 8, one.name, colors.text if one.ours else colors.faint, bold=one.ours)
        yield _box(LEFT, y, width, BAR_HEIGHT, fill)
        yield _text(LEFT + width + 10, y + 23, one.told, colors.text, size=17, bold=one.ours)


def _cards(shares: Sequence[Share], colors: Colors) -> Iterator[str]:
    types = list(dict.fromkeys(one.device_class for one in shares))
    left = LEFT + BARS + GAP
    yield _text(
        left, 24, "each card's part, where memory is scarce", colors.text, size=15, bold=True
    )
    for number, one in enumerate(shares):
        x = left + number % 2 * (CARD_WIDTH + CARD_GAP)
        y = 36 + number // 2 * (CARD_HEIGHT + CARD_GAP - 8)
        fill = colors.devices[types.index(one.device_class) % len(colors.devices)]
        yield (
            f'<rect x="{x}" y="{y}" width="{CARD_WIDTH}" height="{CARD_HEIGHT - 8}" rx="8" '
            f'fill="none" stroke="{colors.line}"/>'
        )
        yield _text(x + 12, y + 22, one.device, colors.text, bold=True)
        for row, (what, part) in enumerate((("computes", one.computed), ("stores", one.stored))):
            at, inside = y + 44 + row * 30, CARD_WIDTH - 24
            yield _text(x + 12, at, what, colors.faint, size=13)
            yield _text(
                x + CARD_WIDTH - 12, at, _percent(part), colors.text,
                size=13, bold=True, end=True,
            )  # fmt: skip
            yield _box(x + 12, at + 6, inside, 7, colors.track)
            yield _box(x + 12, at + 6, inside * part, 7, fill)


def _text(
    x: float, y: float, text: str, fill: str, *, size: int = 14, bold: bool = False,
    end: bool = False,
) -> str:  # fmt: skip
    weight = ' font-weight="600"' if bold else ""
    anchor = ' text-anchor="end"' if end else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{weight}{anchor}>'
        f"{escape(text)}</text>"
    )


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="3" '
        f'fill="{fill}"/>'
    )
