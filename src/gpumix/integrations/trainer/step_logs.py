"""Values that a program's `compute_loss` logs itself.

It is called for each micro-batch, and in rehearsals, where stock calls it once for a batch: what is
logged in a step is told once, as the mean over this rank's samples, and nothing of evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

# Of the micro-batch whose loss is computed. Each of several that take turns has a context.
_samples: ContextVar[int] = ContextVar("samples", default=0)
Noted = Sequence[tuple[int, Mapping[str, Any]]]


@contextmanager
def noted(samples: int) -> Iterator[None]:
    """Inside, where a loss is computed of so many samples, what is logged is kept for the step."""
    before = _samples.get()
    _samples.set(samples)
    try:
        yield
    finally:
        _samples.set(before)


class LogsOfSteps:
    """A trainer that keeps what is logged while losses are computed."""

    _noted: Noted = ()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if samples := _samples.get():
            self._noted = (*self._noted, (samples, dict(logs)))
        else:
            super().log(logs, *args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _logs_of_step(self) -> Iterator[None]:
        """Afterwards, what was kept inside is logged; nothing that was kept before is."""
        self._noted = ()
        yield
        kept, self._noted = self._noted, ()
        if kept:
            self.log({name: _mean(name, kept) for _, logs in kept for name in logs})


def _mean(name: str, kept: Noted) -> Any:
    """Over samples; the last value of what is no number."""
    own = [(samples, logs[name]) for samples, logs in kept if name in logs]
    last = own[-1][1]
    is_number = isinstance(last, int | float | torch.Tensor)
    if not is_number or (isinstance(last, torch.Tensor) and last.numel() != 1):
        return last
    return sum(n * float(value) for n, value in own) / sum(n for n, _ in own)
