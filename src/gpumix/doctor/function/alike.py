"""Comparison of two windows' losses, up to rounding differences caused by a change. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import mean, variance

COMPARED = 8  # losses compared; later losses drift apart by rounding alone
ROUNDING = 2e-3  # relative difference allowed for changes not listed below
COARSE = {"autocast": 3e-2, "tf32": 1e-2, "attention": 1e-2, "compile": 1e-2}
# Changes possibly redrawing samples or random numbers: losses agree in the mean only.
REDRAWN = {"num_workers", "batch_size"}
SPREAD = 3.0  # standard errors allowed between the means


def unlike(before: Sequence[float], after: Sequence[float], changes: Iterable[str]) -> str:
    """Describe the difference of losses; empty without a difference or without usable losses.

    Args:
        changes: names of the changed settings.
    """
    if not before or not after:
        return ""
    if not all(map(math.isfinite, before)):
        return ""
    if not all(map(math.isfinite, after)):
        return "losses are not finite"
    names = set(changes)
    rounding = max([ROUNDING, *(COARSE.get(name, 0.0) for name in names)])
    size = max(1e-12, mean(map(abs, before[:COMPARED])))
    apart = max(abs(a - b) for a, b in zip(before[:COMPARED], after[:COMPARED])) / size
    if apart <= rounding:
        return ""
    if names & REDRAWN and _alike_in_the_mean(before, after, rounding * size):
        return ""
    return f"losses differ by {apart:.1%}, rounding explains {rounding:.1%}"


def _alike_in_the_mean(before: Sequence[float], after: Sequence[float], rounding: float) -> bool:
    n = min(len(before), len(after))
    if n < 2:
        return False
    error = math.sqrt((variance(before[:n]) + variance(after[:n])) / n)
    return abs(mean(before[:n]) - mean(after[:n])) <= SPREAD * error + rounding
