"""Detection of model lines that make the host wait for the GPU, which then runs out of work."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import gpumix
from gpumix.hardware import runtime

SYNC_WARNING = "called a synchronizing CUDA operation"  # in torch's warning
_IGNORED_FOLDERS = (
    Path(gpumix.__file__).parent,
    Path(torch.__file__).parent,
)  # synchronize on purpose


@contextmanager
def record_syncs(device: torch.device | None) -> Iterator[Callable[[], list[tuple[str, float]]]]:
    """Yield a function returning the lines that waited for `device` in the block, most frequent
    first; empty without a GPU."""
    if device is None or not runtime.is_gpu(device):
        yield list
        return
    before = runtime.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime.set_sync_debug_mode("warn")
        try:
            yield lambda: count_lines(caught)
        finally:
            runtime.set_sync_debug_mode(before)


def count_lines(caught: list[warnings.WarningMessage]) -> list[tuple[str, float]]:
    """Count the places in torch's warnings outside of gpumix and torch."""
    places = Counter(
        f"{one.filename}:{one.lineno}"
        for one in caught
        if SYNC_WARNING in str(one.message)
        and not any(Path(one.filename).is_relative_to(folder) for folder in _IGNORED_FOLDERS)
    )
    return [(place, float(times)) for place, times in places.most_common()]
