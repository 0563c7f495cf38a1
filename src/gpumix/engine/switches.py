"""Settings of a model that are off at times, and else as its user left them: caches of keys and
values, checkpointing of its own, and LayerDrop.

LayerDrop leaves out whole blocks at random in training. Each micro-batch leaves out other ones, as
each batch does without a plan. While devices are measured, and while a loss is rehearsed, none is
left out.
Fan, Grave, Joulin: Reducing Transformer Depth on Demand, https://arxiv.org/abs/1909.11556.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import functional

CACHE, CHECKPOINTING = "use_cache", "gradient_checkpointing"
LAYER_DROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop")


class Switches:
    """Settings that are on or off, or rates.

    Args:
        places: objects and the names of their settings.
    """

    def __init__(self, places: Iterable[tuple[Any, str]]) -> None:
        self._places = list(places)
        self._before: list[tuple[Any, str, bool | float]] = []

    @property
    def on(self) -> list[tuple[Any, str, bool | float]]:
        """Those that are: objects, names and values."""
        every = ((held, name, getattr(held, name)) for held, name in self._places)
        return [(h, n, value) for h, n, value in every if isinstance(value, bool | float) and value]

    def off(self) -> None:
        """Switch all off, until the context ends, if there is one."""
        on = self.on
        for held, name, value in on:
            setattr(held, name, type(value)())
        self._before += on

    def __enter__(self) -> None:
        self.off()

    def __exit__(self, *_: object) -> None:
        for held, name, value in self._before:
            setattr(held, name, value)
        self._before.clear()


def in_units(model: nn.Module) -> Switches:
    """What a model cannot do while it runs in units: these run twice a step (forward, recompute),
    so nothing may remember the first run, and the model must not recompute by itself."""
    every = [(config, CACHE) for config in _configs(model)]
    every += [(module, CHECKPOINTING) for module in model.modules()]
    return Switches((held, name) for held, name in every if hasattr(held, name))


def layer_drop(model: nn.Module) -> Switches:
    """How often blocks are left out in training, as far as settings of the usual names say."""
    holders = [*model.modules(), *_configs(model)]
    settings = ((held, getattr(held, "__dict__", {})) for held in holders)
    return Switches((held, n) for held, own in settings for n in LAYER_DROP if n in own)


@contextmanager
def norms_of_one_sample() -> Iterator[None]:
    """Inside, batch norm computes a single sample in training too, where torch refuses that: nobody
    looks at the values while devices are measured."""
    library: Any = functional
    before = library._verify_batch_size
    library._verify_batch_size = lambda size: None
    try:
        yield
    finally:
        library._verify_batch_size = before


def _configs(model: nn.Module) -> list[Any]:
    """What modules keep by that name, which may be anything: a dict, a number."""
    every = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in every if config is not None}.values())
