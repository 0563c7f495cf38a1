"""Model settings that are off at times, and otherwise as the user set them: key-value caches, the
model's own checkpointing, and LayerDrop.

LayerDrop leaves out whole blocks at random in training. Each micro-batch leaves out different
blocks, as each batch does without a plan. While devices are measured, and while a loss is
rehearsed, no block is left out.

A model's own checkpointing is a setting, or a call: `torch.utils.checkpoint.checkpoint(block, x)`.
While the engine runs a model, the plan decides which blocks are recomputed, and `checkpoint` only
calls its function: a double recompute would be slow, and would call the block once more than
planned.

Fan, Grave, Joulin: Reducing Transformer Depth on Demand, https://arxiv.org/abs/1909.11556.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn import functional
from torch.utils import checkpoint as library

from gpumix.hardware.host.replaced_attributes import replace_attributes

CACHE, CHECKPOINTING = "use_cache", "gradient_checkpointing"
LAYER_DROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop")


def _yield_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _DirectCall:
    """Replaces the autograd function that recomputes."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


# Internals that `torch.utils.checkpoint.checkpoint` calls around its function, for either kind, and
# what makes it call the function directly.
DIRECT_CALLS = (
    (library, "_checkpoint_without_reentrant_generator", _yield_once),
    (library, "CheckpointFunction", _DirectCall),
)


class SwitchedSettings:
    """Settings that are on or off, or rates.

    Args:
        places: objects with the names of their settings.
        replaced: objects with names of further attributes, and their values inside the context.
    """

    def __init__(
        self, places: Iterable[tuple[Any, str]], replaced: Iterable[tuple[Any, str, Any]] = ()
    ) -> None:
        self._places = list(places)
        self._replaced = list(replaced)
        self._before: list[tuple[Any, str, Any]] = []

    @property
    def on(self) -> list[tuple[Any, str, bool | float]]:
        """Settings that are on: objects, names and values."""
        every = ((held, name, getattr(held, name)) for held, name in self._places)
        return [(h, n, value) for h, n, value in every if isinstance(value, bool | float) and value]

    def switch_off(self) -> None:
        """Switch all settings off, until the end of the context, if entered."""
        on = self.on
        for held, name, value in on:
            setattr(held, name, type(value)())
        self._before += on

    def __enter__(self) -> None:
        self.switch_off()
        for held, name, value in self._replaced:
            self._before.append((held, name, getattr(held, name)))
            setattr(held, name, value)

    def __exit__(self, *_: object) -> None:
        for held, name, value in self._before:
            setattr(held, name, value)
        self._before.clear()


def find_unit_conflicts(model: nn.Module) -> SwitchedSettings:
    """Return the settings that conflict with running in units. Units run twice a step (forward,
    recompute): nothing may remember the first run, and the model must not recompute by itself."""
    every = [(config, CACHE) for config in _configs(model)]
    every += [(module, CHECKPOINTING) for module in model.modules()]
    found = ((held, name) for held, name in every if hasattr(held, name))
    return SwitchedSettings(found, DIRECT_CALLS)


def find_layer_drop_rates(model: nn.Module) -> SwitchedSettings:
    """Return the rates of leaving out blocks in training, from settings of the usual names."""
    holders = [*model.modules(), *_configs(model)]
    settings = ((held, getattr(held, "__dict__", {})) for held in holders)
    return SwitchedSettings((held, n) for held, own in settings for n in LAYER_DROP if n in own)


def bypass_torch_checkpoint() -> AbstractContextManager[None]:
    """Make `torch.utils.checkpoint.checkpoint` call its function directly, in the body."""
    return SwitchedSettings((), DIRECT_CALLS)


def allow_single_sample_norm() -> AbstractContextManager[None]:
    """Let batch norm compute a single sample in training too, which torch refuses. While devices
    are measured, values do not matter."""
    return replace_attributes(functional, _verify_batch_size=lambda size: None)


def _configs(model: nn.Module) -> list[Any]:
    """Return the attributes `config` of modules, of any type: a dict, a number."""
    every = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in every if config is not None}.values())
