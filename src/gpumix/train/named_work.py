"""The work of ranks by its name. Whoever starts them has no use for what it imports: all that
trains, and torch's tensors of several devices, half a second of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Literal


def work_of(name: Literal["profile", "train", "try_out"]) -> Callable[..., Any]:
    """The function of that name in `work`, imported where it is called."""
    return partial(_call, name)


def _call(name: str, *args: Any) -> Any:
    return getattr(import_module("gpumix.train.work"), name)(*args)
