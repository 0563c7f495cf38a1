"""LayerDrop: a model that leaves out whole blocks at random in training.

Each micro-batch leaves out other ones, as each batch does without a plan. While devices are
measured, and while a loss is rehearsed, none is left out.
Fan, Grave, Joulin: Reducing Transformer Depth on Demand, https://arxiv.org/abs/1909.11556.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

NAMES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop")


def _places(model: nn.Module) -> Iterator[tuple[Any, str, float]]:
    """Modules and configurations that say how often blocks are left out."""
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}
    for holder in (*modules, *configs.values()):
        for name in NAMES:
            rate = vars(holder).get(name)
            if isinstance(rate, float) and rate > 0:
                yield holder, name, rate


def drops_layers(model: nn.Module) -> bool:
    """Whether blocks are left out in training, as far as settings of the usual names say."""
    return next(_places(model), None) is not None


def stop_layer_drop(model: nn.Module) -> Callable[[], None]:
    """Let no block be left out, until what is returned is called."""
    found = list(_places(model))
    for holder, name, _ in found:
        setattr(holder, name, 0.0)

    def go_on() -> None:
        for holder, name, rate in found:
            setattr(holder, name, rate)

    return go_on
