"""The arguments given to a trainer, while transformers' loop runs with other arguments.

The plan cuts a batch into micro-batches, so for transformers' loop a batch is a step. Callbacks,
trackers and saved files see the given arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.integrations.common.plan_and_shard import get_world_size
from gpumix.integrations.transformers.arguments import FOLDED, fold_accumulation

_ABSENT = object()


class FoldedArgumentsMixin:
    """Part of a trainer with both sets of arguments."""

    args: Any
    _given_args: Any = None  # set while the loop runs with folded arguments
    _known_fields: dict[str, Any]  # equal in both

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
        self.args, self._known_fields = fold_accumulation(given), dict(vars(given))
        try:
            yield
        finally:
            self._copy_changes(self.args, given)
            self.args, self._given_args = given, None

    def _unfolded(self) -> AbstractContextManager[None]:
        """Use the given arguments inside the context."""
        return replace_attributes(self, args=self._user_args)

    def _given_counts(self) -> AbstractContextManager[None]:
        """Use the given number of accumulation steps inside the context, and the samples of a batch
        of all processes as those of one process."""
        given = self._given_args
        if given is None:
            return nullcontext()
        return replace_attributes(
            self.args,
            gradient_accumulation_steps=given.gradient_accumulation_steps,
            per_device_train_batch_size=given.per_device_train_batch_size * get_world_size(),
        )

    def _call_callbacks(self, call: Any, event: str, args: Any, *more: Any, **kwargs: Any) -> Any:
        given = self._given_args
        if given is None:
            return call(event, args, *more, **kwargs)
        self._copy_changes(self.args, given)
        try:
            return call(event, given, *more, **kwargs)
        finally:
            self._copy_changes(given, self.args)

    def _copy_changes(self, args: Any, other: Any) -> None:
        """Copy fields of arguments that a program changed, except those that differ in the loop."""
        for name, value in vars(args).items():
            if name not in FOLDED and self._known_fields.get(name, _ABSENT) is not value:
                self._known_fields[name] = value
                setattr(other, name, value)

    @property
    def _accumulation_steps(self) -> int:
        return int(self._user_args.gradient_accumulation_steps)
