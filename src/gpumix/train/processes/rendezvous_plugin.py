"""Entry point of the package for torchrun, found by every program started by torchrun: nothing is
imported until an agent uses the rendezvous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def backend() -> Callable[[Any], Any]:
    """Return the factory of the handler of `torchrun --rdzv-backend gpumix`."""

    def handler(parameters: Any) -> Any:
        from gpumix.train.processes.rendezvous_handler import make_handler

        return make_handler(parameters)

    return handler
