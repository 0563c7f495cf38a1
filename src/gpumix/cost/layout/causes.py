"""Measurable causes of memory: layout on a device between steps, and samples at the peak."""

from __future__ import annotations

from collections.abc import Mapping

PARTS = ("laid out", "samples")
OF_SAMPLES = ("activations", "boundary gradients", "working set")


def in_parts(causes: Mapping[str, int]) -> dict[str, int]:
    """Group a prediction by cause into parts; framework memory is in no tensor and left out."""
    samples = sum(causes.get(name, 0) for name in OF_SAMPLES)
    laid_out = sum(causes.values()) - samples - causes.get("framework", 0)
    return dict(zip(PARTS, (laid_out, samples)))
