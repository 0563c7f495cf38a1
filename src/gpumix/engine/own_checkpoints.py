"""Activation checkpointing by a model's own code: `torch.utils.checkpoint.checkpoint(block, x)`.

While a plan runs the model, the plan decides which blocks are computed again. The model's own
`checkpoint` then only computes: to recompute twice would be slow, and the second run would call the
block once more than the plan knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint as library

# What `checkpoint` calls around the function, of either kind.
_AROUND, _REENTRANT = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


def _nothing_around(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Computes:
    """In the place of the function of autograd that computes again."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


@contextmanager
def taken_over() -> Iterator[None]:
    """Inside, `torch.utils.checkpoint.checkpoint` calls its function as it is."""
    before = vars(library)[_AROUND], vars(library)[_REENTRANT]
    vars(library).update({_AROUND: _nothing_around, _REENTRANT: _Computes})
    try:
        yield
    finally:
        vars(library).update({_AROUND: before[0], _REENTRANT: before[1]})
