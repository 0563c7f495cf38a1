"""Number formats of the page; unknown values are a dash."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import fmean

from gpumix.schema.units import show_bytes, show_seconds

UNKNOWN = "–"
HEIGHTS = "▁▂▃▄▅▆▇█"


def format_number(value: float | None) -> str:
    """Format a number with its significant digits: 1,095, 34.8, 0.52."""
    if value is None:
        return UNKNOWN
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def format_token_rate(tokens_per_s: float | None) -> str:
    return UNKNOWN if tokens_per_s is None else f"{format_number(tokens_per_s)} tokens/s"


def format_link_rate(bytes_per_s: float) -> str:
    """Format the rate of a link in decimal units."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s / 1e3:.3g} kB/s"


def format_seconds(value: float | None) -> str:
    return UNKNOWN if value is None else show_seconds(value)


def format_bytes(value: float | None) -> str:
    return UNKNOWN if value is None else show_bytes(value)


def format_fraction(value: float | None) -> str:
    """Format a fraction in percent."""
    return UNKNOWN if value is None else f"{value:.1%}"


def format_factor(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}×"


def format_error(predicted: float | None, measured: float | None) -> str:
    """Format the prediction's error relative to the measurement."""
    if predicted is None or not measured:
        return UNKNOWN
    return f"{predicted / measured - 1:+.1%}"


def format_time(at: float | None) -> str:
    """Format a time in UTC, since readers may be in any time zone."""
    if at is None:
        return ""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return ""


def join_names(names: tuple[str, ...], most: int = 4) -> str:
    """Join names, limited to the first `most` and the count of the rest."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def format_progress(step: int, steps: int | None) -> str:
    """Format a run's step; the total is not always known."""
    if steps:
        return f"step {step:,} of {steps:,}"
    return f"step {step:,}" if step else "no step yet"


def draw_sparkline(values: Sequence[float], places: int = 24) -> str:
    """Draw values in one line, scaled from lowest to highest; averages many values."""
    size = -(-len(values) // places)
    means = [fmean(values[n : n + size]) for n in range(0, len(values), size or 1)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    top = len(HEIGHTS) - 1
    return "".join(HEIGHTS[round((one - low) / span * top) if span > 0 else 0] for one in means)


def draw_gauge(
    used: float | None, expected: float | None, limit: float | None, places: int = 12
) -> str:
    """Draw a bar of the used part of a limit; a line marks the expected part."""
    if used is None or not limit:
        return UNKNOWN
    full = min(places, round(places * used / limit))
    cells = [*"█" * full, *"░" * (places - full)]
    if expected is not None:
        cells[min(places - 1, int(places * expected / limit))] = "┃"
    return "".join(cells)
