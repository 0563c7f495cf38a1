"""What backward needs of a unit's forward, computed again instead of kept.

The forward pass leaves the graph without the tensors that it saved. The first of them that backward
asks for runs the unit again, up to the last one: what follows that, the last linear layer as a
rule, is not computed twice. The idea is that of `torch.utils.checkpoint` without reentry; that one
imports the compiler (a second in every process), and fails where a backward asks twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from gpumix.engine.coroutine import ModelError

T = TypeVar("T")


class Recomputed(Generic[T]):
    """One run of a unit whose saved tensors are dropped, and computed again in backward.

    Args:
        label: the unit's name, for error messages.
        run: the unit's forward; it must do the same each time.
    """

    def __init__(self, label: str, run: Callable[[], T]) -> None:
        self._label = label
        self._run = run
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._found: dict[int, torch.Tensor] = {}

    def forward(self) -> T:
        """Run the unit with gradients, and keep only the graph."""
        with torch.enable_grad(), saved_tensors_hooks(self._drop, self._give):
            return self._run()

    def _drop(self, tensor: torch.Tensor) -> int:
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def _give(self, number: int) -> torch.Tensor:
        if number not in self._found:
            self._again()
        # Not kept: memory falls while backward goes on. To ask twice costs another run.
        return self._found.pop(number)

    def _again(self) -> None:
        count = 0

        def keep(tensor: torch.Tensor) -> Any:
            nonlocal count
            if self._saved[count] != (tensor.shape, tensor.dtype):
                raise self._differs(count, tensor)
            # Detached: a graph that holds its own output would never be freed.
            self._found[count] = kept = tensor.detach()
            count += 1
            if count == len(self._saved):
                raise _Enough
            return kept

        try:
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
                self._run()
        except _Enough:
            return
        raise self._differs(count, None)

    def _differs(self, number: int, tensor: torch.Tensor | None) -> ModelError:
        shape, dtype = self._saved[number]
        now = "nothing" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
        return ModelError(
            f"unit '{self._label}' computes something else when it is run again in backward",
            why=f"it saved {list(shape)} of {dtype} for its backward, and then {now}",
            fix="it must do the same whenever it gets the same inputs: no counters, caches or "
            "random generators of its own",
        )


class _Enough(BaseException):
    """All that was saved is there again. Not an `Exception`: a model's own code may catch those."""
