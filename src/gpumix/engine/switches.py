"""What a model does by itself and cannot do while it runs in units: caches of keys and values, and
checkpointing of its own. Off while an engine runs it; else the model is as its user left it."""

from __future__ import annotations

from typing import Any

from torch import nn

CACHE, CHECKPOINTING = "use_cache", "gradient_checkpointing"


class Switches:
    """Of one model. Units run twice a step (forward, recompute): nothing may remember the first
    run, and the model must not recompute by itself."""

    def __init__(self, model: nn.Module) -> None:
        every = (getattr(module, "config", None) for module in model.modules())
        configs = {id(config): config for config in every if config is not None}
        self._places: list[tuple[Any, str]] = [
            *((config, CACHE) for config in configs.values() if hasattr(config, CACHE)),
            *((m, CHECKPOINTING) for m in model.modules() if hasattr(m, CHECKPOINTING)),
        ]
        self._were_on: list[tuple[Any, str]] = []

    def off(self) -> None:
        """Switch all off, until the context ends, if there is one."""
        on = [(held, name) for held, name in self._places if getattr(held, name) is True]
        for held, name in on:
            setattr(held, name, False)
        self._were_on += on

    def __enter__(self) -> None:
        self.off()

    def __exit__(self, *_: object) -> None:
        for held, name in self._were_on:
            setattr(held, name, True)
        self._were_on.clear()
