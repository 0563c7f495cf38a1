"""Activation checkpointing by a model's own code: `torch.utils.checkpoint.checkpoint(block, x)`.

While the engine runs a model, the plan decides which blocks are recomputed, and the model's own
`checkpoint` only calls its function. A double recompute would be slow, and would call the block
once more than planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint as library

# Internals that `checkpoint` calls around the function, for either kind.
_NON_REENTRANT_NAME, _REENTRANT_NAME = (
    "_checkpoint_without_reentrant_generator",
    "CheckpointFunction",
)


def _yield_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _DirectCall:
    """Replaces the autograd function that recomputes."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


@contextmanager
def bypass_torch_checkpoint() -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint` call its function directly, in the body."""
    before = vars(library)[_NON_REENTRANT_NAME], vars(library)[_REENTRANT_NAME]
    vars(library).update({_NON_REENTRANT_NAME: _yield_once, _REENTRANT_NAME: _DirectCall})
    try:
        yield
    finally:
        vars(library).update({_NON_REENTRANT_NAME: before[0], _REENTRANT_NAME: before[1]})
