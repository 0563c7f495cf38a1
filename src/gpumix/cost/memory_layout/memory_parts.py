"""Measurable causes of memory: layout on a device between steps, and samples at the peak."""

from __future__ import annotations

from collections.abc import Mapping

MEMORY_PARTS = ("laid out", "samples")
SAMPLE_CAUSES = ("activations", "boundary gradients", "working set")


def group_by_part(causes: Mapping[str, int]) -> dict[str, int]:
    """Group a prediction by cause into parts; framework memory is in no tensor and left out."""
    samples = sum(causes.get(name, 0) for name in SAMPLE_CAUSES)
    laid_out = sum(causes.values()) - samples - causes.get("framework", 0)
    return dict(zip(MEMORY_PARTS, (laid_out, samples)))
