"""The factories of a long job: a small model, its tokens, and a clock that jumps."""

from __future__ import annotations

import random
import time
from typing import Any

import toys

JUMP_S = 86_400.0
EVERY = 200  # calls between two jumps


class Jumping:
    """A clock of the wall that is set a day on or back again and again, as by hand."""

    def __init__(self) -> None:
        self._told, self._off_s, self._calls = time.time, 0.0, 0
        self._random = random.Random(0)

    def __call__(self) -> float:
        self._calls += 1
        if self._calls % EVERY == 0:
            self._off_s += self._random.choice((-JUMP_S, JUMP_S))
        return self._told() + self._off_s


def model(**arguments: Any) -> Any:
    """A toy, in a process whose clock jumps from now on."""
    if not isinstance(time.time, Jumping):
        time.time = Jumping()
    return toys.model(**arguments)


def tokens(*, length: int) -> Any:
    return toys.tokens(length=length)
