"""What a stage ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proof.lines import Bar


@dataclass(frozen=True)
class Outcome:
    """The figures of a stage, and their bars."""

    figures: Mapping[str, Any]
    bars: tuple[Bar, ...] = ()
