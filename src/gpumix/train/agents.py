"""What torchrun finds of gpumix in every program that it starts, by an entry point of the package:
so nothing is imported until an agent is to meet others by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def backend() -> Callable[[Any], Any]:
    """Makes the handler of `torchrun --rdzv-backend gpumix`."""

    def handler(parameters: Any) -> Any:
        from gpumix.train.meeting import handler

        return handler(parameters)

    return handler
