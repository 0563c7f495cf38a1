"""Who watches a trial from inside of its ranks, and may change what code does there: the doctor."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class Watcher(Protocol):
    """Goes to each rank, and is entered there before the rank opens its device.

    Attributes:
        looks: whether it wants a step more, after all others; the same on all ranks.
    """

    looks: bool

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def begins(self) -> None:
        """Steps count from here."""

    def ends(self) -> None:
        """No more do."""

    def looking(self) -> AbstractContextManager[None]:
        """Around the step that it wants."""

    def told(self) -> Any:
        """What it saw, as JSON has it."""
