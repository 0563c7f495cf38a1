"""Shared elements of the page's pictures: bars, ticks and legends, placed in percent.

Widths are in percent and heights in pixels. Letters keep their size on any screen, and no script is
needed for layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from gpumix.report.html import Child, Markup, el

TYPE_COLORS = 6  # colours of GPU types in the style sheet, t0 to t5
TONES = 5  # of each colour, "" and tone1 to tone4


def get_type_class(number: int, tone: int = 0) -> str:
    """Return the style sheet's class of a GPU type, in one of its tones."""
    color = f"t{number % TYPE_COLORS}"
    return f"{color} tone{tone}" if tone else color


def percent(part: float) -> str:
    """Format a fraction as a position, clamped to the picture."""
    return f"{100 * min(1.0, max(0.0, part)):.4g}%"


def draw_picture(title: str, height: float, *children: Child, class_: str = "") -> Markup:
    """Return an image with a title for screen readers, filling the available width."""
    return el(
        "svg",
        el("title", title),
        children,
        role="img",
        width="100%",
        height=height,
        class_=class_ or None,
    )


def draw_bar(
    begin: float, end: float, *, y: float, height: float, class_: str, title: str = ""
) -> Markup:
    """Return a bar between two fractions of the width."""
    width = max(0.0, min(1.0, end) - max(0.0, begin))
    return el(
        "rect",
        el("title", title) if title else None,
        x=percent(begin),
        y=y,
        width=percent(width),
        height=height,
        class_=class_,
    )


def draw_label(at: float, y: float, words: str, *, class_: str = "") -> Markup:
    """Return a text at a fraction of the width, aligned to stay inside at both ends."""
    anchor = "start" if at < 0.04 else "end" if at > 0.96 else "middle"
    return el("text", words, x=percent(at), y=y, text_anchor=anchor, class_=class_ or None)


def draw_tick(at: float, y1: float, y2: float, class_: str = "grid") -> Markup:
    """Return a vertical line."""
    return el("line", x1=percent(at), x2=percent(at), y1=y1, y2=y2, class_=class_)


Shape = Literal["square", "line", "dot", "mark"]
Entry = tuple[str, str] | tuple[str, str, Shape]


def draw_legend(entries: Iterable[Entry]) -> Markup:
    """Return a legend of style sheet classes, with words and shapes."""
    items = (el("li", _swatch(class_, *shape), words) for class_, words, *shape in entries)
    return el("ul", items, class_="legend")


def _swatch(class_: str, shape: Shape = "square") -> Markup:
    width, drawn = 11, el("rect", width=11, height=11, rx=2, class_=class_)
    if shape == "line":
        width, drawn = 22, el("line", x1=0, x2=22, y1=5.5, y2=5.5, class_=class_)
    elif shape == "dot":
        drawn = el("circle", cx=5.5, cy=5.5, r=4, class_=class_)
    elif shape == "mark":
        drawn = el("line", x1=5.5, x2=5.5, y1=0, y2=11, class_=class_)
    return el("svg", drawn, width=width, height=11, aria_hidden="true", class_="swatch")


def choose_ticks(low: float, high: float, about: int = 4) -> Sequence[float]:
    """Return round numbers between `low` and `high`."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]
