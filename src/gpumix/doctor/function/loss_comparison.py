"""Comparison of two windows' losses, up to rounding differences caused by a change. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import mean, variance

COMPARED_LOSSES = 8  # losses compared; later losses drift apart by rounding alone
ROUNDING = 2e-3  # relative difference allowed for changes not listed below
ROUNDING_BY_CHANGE = {"autocast": 3e-2, "tf32": 1e-2, "attention": 1e-2, "compile": 1e-2}
# Changes possibly redrawing samples or random numbers: losses agree in the mean only.
RESAMPLING_CHANGES = {"num_workers", "batch_size"}
RETRAINING_CHANGES = {"reuse_optimizer"}  # losses differ by intention
MOST_STANDARD_ERRORS = 3.0  # standard errors allowed between the means


def describe_loss_difference(
    before: Sequence[float], after: Sequence[float], changes: Iterable[str]
) -> str:
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
    if names & RETRAINING_CHANGES:
        return ""
    rounding = max([ROUNDING, *(ROUNDING_BY_CHANGE.get(name, 0.0) for name in names)])
    size = max(1e-12, mean(map(abs, before[:COMPARED_LOSSES])))
    apart = (
        max(abs(a - b) for a, b in zip(before[:COMPARED_LOSSES], after[:COMPARED_LOSSES])) / size
    )
    if apart <= rounding:
        return ""
    if names & RESAMPLING_CHANGES and _has_equal_mean(before, after, rounding * size):
        return ""
    return f"losses differ by {apart:.1%}, rounding explains {rounding:.1%}"


def _has_equal_mean(before: Sequence[float], after: Sequence[float], rounding: float) -> bool:
    n = min(len(before), len(after))
    if n < 2:
        return False
    error = math.sqrt((variance(before[:n]) + variance(after[:n])) / n)
    return abs(mean(before[:n]) - mean(after[:n])) <= MOST_STANDARD_ERRORS * error + rounding
