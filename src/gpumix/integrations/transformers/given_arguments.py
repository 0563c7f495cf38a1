"""The arguments given to a trainer, while transformers' loop runs with other arguments.

The plan cuts a batch into micro-batches, so for transformers' loop a batch is a step. Callbacks,
trackers and saved files see the given arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpumix.integrations.transformers.arguments import COUNTS, fold_accumulation


class FoldedArgumentsMixin:
    """Part of a trainer with both sets of arguments."""

    args: Any
    _given_args: Any = None  # set while the loop runs with folded arguments

    @property
    def _user_args(self) -> Any:
        return self._given_args or self.args

    @contextmanager
    def _folded(self) -> Iterator[None]:
        """Use arguments with one batch per step, inside the context; callbacks and files still get
        the given arguments."""
        if self._given_args is not None:
            yield
            return
        given = self._given_args = self.args
        self.args = fold_accumulation(given)
        try:
            yield
        finally:
            self.args, self._given_args = given, None

    @contextmanager
    def _unfolded(self) -> Iterator[None]:
        """Use the given arguments inside the context."""
        now = self.args
        self.args = self._user_args
        try:
            yield
        finally:
            self.args = now

    @contextmanager
    def _given_counts(self) -> Iterator[None]:
        """Use the given numbers of samples and accumulation steps inside the context, and nothing
        else of the given arguments."""
        now = self.args
        self.args = copy.copy(now)
        for name in COUNTS:
            setattr(self.args, name, getattr(self._user_args, name))
        try:
            yield
        finally:
            self.args = now

    def _call_callbacks(self, call: Any, event: str, args: Any, *more: Any, **kwargs: Any) -> Any:
        return call(event, self._given_args or args, *more, **kwargs)

    @property
    def _accumulation_steps(self) -> int:
        return int(self._user_args.gradient_accumulation_steps)
