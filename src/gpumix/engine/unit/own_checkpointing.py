"""Activation checkpointing by a model's own code: `torch.utils.checkpoint.checkpoint(block, x)`.

While the engine runs a model, the plan decides which blocks are recomputed, and the model's own
`checkpoint` only calls its function. A double recompute would be slow, and would call the block
once more than planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils import checkpoint as library

from gpumix.hardware.host.replaced_attributes import replace_attributes


def _yield_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _DirectCall:
    """Replaces the autograd function that recomputes."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def bypass_torch_checkpoint() -> AbstractContextManager[None]:
    """Make `torch.utils.checkpoint.checkpoint` call its function directly, in the body."""
    # Internals that `checkpoint` calls around the function, for either kind.
    return replace_attributes(
        library,
        _checkpoint_without_reentrant_generator=_yield_once,
        CheckpointFunction=_DirectCall,
    )
