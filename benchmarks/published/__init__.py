"""Measurements of real GPUs that others published, as profiles; skipped where they are not here.

The files lie beside the project, in `../shared/data` from its root, with their licences and a
README; nothing of them is copied into it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"

GIB = 1024**3
SAMPLES = float(2**16)  # the far end of straight lines: more samples than any batch here has


@dataclass(frozen=True)
class Work:
    """What one layer computes of a sample.

    Attributes:
        flops: of the forward.
        elements: of its parameters.
        saved_elements: of the tensors that the forward leaves for the backward.
    """

    flops: float
    elements: int
    saved_elements: float


class NotHereError(Exception):
    """The published files are not on this machine."""


@cache
def read(path: str) -> Any:
    """The JSON in `path`, which is relative to the folder of published measurements.

    Raises:
        NotHereError: there is no such file.
    """
    file = DATA / path
    if not file.exists():
        raise NotHereError(f"skipped: the published measurements are not here ({file})")
    return json.loads(file.read_text(encoding="utf-8"))
