"""Causes of memory as they can be measured: what lies on a device between steps, and what samples
add at the peak."""

from __future__ import annotations

from collections.abc import Mapping

PARTS = ("laid out", "samples")
OF_SAMPLES = ("activations", "boundary gradients", "working set")


def in_parts(causes: Mapping[str, int]) -> dict[str, int]:
    """Of a prediction by cause; what the framework takes is no tensor's, and left out."""
    samples = sum(causes.get(name, 0) for name in OF_SAMPLES)
    laid_out = sum(causes.values()) - samples - causes.get("framework", 0)
    return dict(zip(PARTS, (laid_out, samples)))
