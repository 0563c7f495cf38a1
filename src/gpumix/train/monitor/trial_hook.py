"""Interface for observing a trial inside its ranks, and maybe changing code: for the doctor."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class TrialObserver(Protocol):
    """Observer sent to each rank, and entered before the rank opens its device.

    Attributes:
        looks: whether to run one more step after all others; equal on all ranks.
    """

    looks: bool

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def begins(self) -> None:
        """Mark the start of the counted steps."""

    def ends(self) -> None:
        """Mark the end of the counted steps."""

    def looking(self) -> AbstractContextManager[None]:
        """Return the context of the extra step."""

    def told(self) -> Any:
        """Return the observations, as in JSON."""
