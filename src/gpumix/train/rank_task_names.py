"""Work of ranks by name. The starting process needs none of the imports: the training code, and
torch's tensors of several devices, half a second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Literal


def load_rank_task(name: Literal["profile", "train", "try_out"]) -> Callable[..., Any]:
    """Return the function `name` of `rank_tasks`, imported when called."""
    return partial(_call_rank_task, name)


def _call_rank_task(name: str, *args: Any) -> Any:
    return getattr(import_module("gpumix.train.rank_tasks"), name)(*args)
