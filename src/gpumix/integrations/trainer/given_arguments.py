"""The arguments of a trainer as they were given, though its loop runs by others.

A plan cuts a batch into micro-batches by itself, so for the loop of transformers one batch is one
step. Callbacks, trackers and saved files see the arguments that the program gave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpumix.integrations.trainer.arguments import folded


class GivenArguments:
    """The part of a trainer that knows both."""

    args: Any
    _given_args: Any = None  # while the loop runs by others

    @property
    def _as_given(self) -> Any:
        return self._given_args or self.args

    @contextmanager
    def _folded(self) -> Iterator[None]:
        """Inside, the arguments are those by which one batch is one step; callbacks and files get
        those that were given."""
        if self._given_args is not None:
            yield
            return
        given = self._given_args = self.args
        self.args = folded(given)
        try:
            yield
        finally:
            self.args, self._given_args = given, None

    @contextmanager
    def _unfolded(self) -> Iterator[None]:
        """Inside, the arguments are those that were given."""
        now = self.args
        self.args = self._as_given
        try:
            yield
        finally:
            self.args = now

    def _called_back(self, call: Any, event: str, args: Any, *more: Any, **kwargs: Any) -> Any:
        return call(event, self._given_args or args, *more, **kwargs)

    @property
    def _accumulates(self) -> int:
        return int(self._as_given.gradient_accumulation_steps)
