"""Numbers as a reader of the page sees them; what is not known is a dash."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import fmean

from gpumix.spec.units import show_bytes, show_seconds

UNKNOWN = "–"
HEIGHTS = "▁▂▃▄▅▆▇█"


def count(value: float | None) -> str:
    """A number with as many digits as say something: 1,095, 34.8, 0.52."""
    if value is None:
        return UNKNOWN
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def rate(tokens_per_s: float | None) -> str:
    return UNKNOWN if tokens_per_s is None else f"{count(tokens_per_s)} tokens/s"


def link(bytes_per_s: float) -> str:
    """The rate of a link, counted as its sellers count."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s / 1e3:.3g} kB/s"


def seconds(value: float | None) -> str:
    return UNKNOWN if value is None else show_seconds(value)


def size(value: float | None) -> str:
    return UNKNOWN if value is None else show_bytes(value)


def part(value: float | None) -> str:
    """A part of a whole."""
    return UNKNOWN if value is None else f"{value:.1%}"


def times(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}×"


def off(predicted: float | None, measured: float | None) -> str:
    """How far the prediction is off, as a part of what was measured."""
    if predicted is None or not measured:
        return UNKNOWN
    return f"{predicted / measured - 1:+.1%}"


def moment(at: float | None) -> str:
    """A time of day, in UTC: who reads a page may be elsewhere."""
    if at is None:
        return ""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return ""


def some(names: tuple[str, ...], most: int = 4) -> str:
    """Names; of many the first and their number."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def how_far(step: int, steps: int | None) -> str:
    """Of a run; how many steps there will be is not always known."""
    if steps:
        return f"step {step:,} of {steps:,}"
    return f"step {step:,}" if step else "no step yet"


def spark(values: Sequence[float], places: int = 24) -> str:
    """The course of a number in one line, from its lowest to its highest; of many values means."""
    size = -(-len(values) // places)
    means = [fmean(values[n : n + size]) for n in range(0, len(values), size or 1)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    top = len(HEIGHTS) - 1
    return "".join(HEIGHTS[round((one - low) / span * top) if span > 0 else 0] for one in means)


def gauge(used: float | None, expected: float | None, limit: float | None, places: int = 12) -> str:
    """A part of a limit as a bar; what was expected as a line in it."""
    if used is None or not limit:
        return UNKNOWN
    full = min(places, round(places * used / limit))
    cells = [*"█" * full, *"░" * (places - full)]
    if expected is not None:
        cells[min(places - 1, int(places * expected / limit))] = "┃"
    return "".join(cells)
