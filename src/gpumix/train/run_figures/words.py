"""Formats of numbers and facts, for all views of a run; unknown values are a dash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from statistics import fmean
from typing import Any

from gpumix.schema.plan.stage import Mode
from gpumix.schema.units import format_count, show_bytes, show_seconds

UNKNOWN = "–"
HEIGHTS = "▁▂▃▄▅▆▇█"
# Causes of `cost.memory_layout` that have other names elsewhere.
MEMORY_NAMES = {
    "state": "sharded state",
    "replicas": "unsharded state",
    "gathered": "all-gathered parameters",
    "boundary gradients": "gradients of activations",
    "working set": "working memory of a layer",
    "framework": "CUDA context and libraries",
    "tensor parallel": "tensor-parallel buffers",
    "laid out": "between steps",
    "samples": "added by samples",
}
FAR_OFF = 0.1  # part of a prediction; larger errors are shown in red


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


def name_memory(cause: str) -> str:
    """Name a cause of memory in the field's terms."""
    return MEMORY_NAMES.get(cause, cause)


def describe_mode(mode: Mode) -> str:
    """Describe how a GPU trades memory for time, in the field's terms."""
    parts = ["activation checkpointing" if mode.recompute else "no activation checkpointing"]
    if mode.boundary == "host":
        parts.append("activations in host memory")
    if mode.order == "sequential":
        parts.append("one micro-batch after the other")
    if mode.head == "chunked":
        parts.append("chunked cross-entropy")
    return ", ".join(parts)


def is_far_off(gap: float | None) -> bool:
    """Return whether a measurement is so far from its prediction that readers should notice."""
    return gap is not None and abs(gap) > FAR_OFF


def describe_gap(slower: float | None) -> str:
    """Describe in words by how much a step is slower than planned; see `RunFigures`."""
    if slower is None:
        return ""
    if slower >= 1:
        return f"{1 + slower:.1f}× the planned time"
    if abs(slower) < 0.005:
        return "as planned"
    return f"{abs(slower):.0%} {'slower' if slower > 0 else 'faster'} than planned"


def describe_excess(predicted: float | None, measured: float | None) -> str:
    """Describe in words by how much a measurement is above its prediction."""
    gap = compute_gap(predicted, measured)
    if gap is None:
        return UNKNOWN
    if gap >= 1:
        return f"{1 + gap:.1f}× as much"
    return "equal" if abs(gap) < 0.005 else f"{abs(gap):.0%} {'more' if gap > 0 else 'less'}"


def compute_gap(predicted: float | None, measured: float | None) -> float | None:
    """Return measured over predicted, minus 1; None if unknown."""
    return None if not predicted or measured is None else measured / predicted - 1


def format_remaining(seconds: float | None) -> str:
    """Format the time until the end; empty if unknown, or at the end."""
    if not seconds:
        return ""
    minutes = int(seconds // 60)
    if minutes >= 24 * 60:
        return f"{minutes // (24 * 60)} d {minutes // 60 % 24} h left"
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min left"
    if minutes:
        return f"{minutes} min {int(seconds % 60)} s left"
    return f"{max(1, round(seconds))} s left"


def format_validation_loss(loss: float, step: int) -> str:
    return f"validation loss {loss:.4f} at step {step:,}"


def describe_model(model: Mapping[str, Any], parameters: int | None = None) -> str:
    """Name a model by its section of a job: its weights, configuration or function."""
    config, weights, factory = (model.get(key) for key in ("config", "weights", "factory"))
    name = ""
    if isinstance(weights, str):
        name = _name_folder(weights)
    elif isinstance(config, str):
        name = _name_folder(config)
    elif isinstance(config, Mapping):
        name = str(config.get("model_type") or "")
    elif isinstance(factory, str):
        name = factory
    size = "" if parameters is None else f"{format_large(parameters)} parameters"
    return ", ".join(filter(None, (name, size)))


def _name_folder(path: str) -> str:
    """Name a file of a model by its folder, which bears the model's name."""
    named = PurePath(path)
    return named.parent.name if named.suffix and named.parent.name else named.name


def format_large(number: float) -> str:
    """Format a large number with three digits: 6.74B, 124M, 820K."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


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


def format_steps(count: int) -> str:
    return format_count(count, "step") if count > 1 else "step" if count else ""


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
