"""Values logged by a program's `compute_loss`.

Rehearsals and each micro-batch call `compute_loss`; stock transformers calls it once per batch.
Values logged in a step are reported once, as the mean over this rank's samples; in evaluations not
at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

# Samples of the micro-batch being computed; interleaved micro-batches have a context each.
_micro_batch_samples: ContextVar[int] = ContextVar("samples", default=0)
CollectedLogs = Sequence[tuple[int, Mapping[str, Any]]]


@contextmanager
def collect_logs(samples: int) -> Iterator[None]:
    """Keep logged values for the step, inside the computation of a loss of `samples`."""
    before = _micro_batch_samples.get()
    _micro_batch_samples.set(samples)
    try:
        yield
    finally:
        _micro_batch_samples.set(before)


class StepLogsMixin:
    """Trainer part keeping values logged during the computation of losses."""

    _noted: CollectedLogs = ()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if samples := _micro_batch_samples.get():
            self._noted = (*self._noted, (samples, dict(logs)))
        else:
            super().log(logs, *args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _log_step_means(self) -> Iterator[None]:
        """Log the kept values on exit; drop values kept before."""
        self._noted = ()
        yield
        kept, self._noted = self._noted, ()
        if kept:
            self.log({name: _average_over_samples(name, kept) for _, logs in kept for name in logs})


def _average_over_samples(name: str, kept: CollectedLogs) -> Any:
    """Return the mean over samples; the last value if not a number."""
    own = [(samples, logs[name]) for samples, logs in kept if name in logs]
    last = own[-1][1]
    is_number = isinstance(last, int | float | torch.Tensor)
    if not is_number or (isinstance(last, torch.Tensor) and last.numel() != 1):
        return last
    return sum(n * float(value) for n, value in own) / sum(n for n, _ in own)
