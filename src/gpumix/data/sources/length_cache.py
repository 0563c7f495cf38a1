"""Sample lengths obtained by counting: counted once per machine, and cached."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gpumix.data.core.build_lock import hold_build_lock
from gpumix.data.core.token_file import make_write_error
from gpumix.schema.files import replace_atomically

_LOG = logging.getLogger(__name__)


def load_or_count_lengths(
    cache: Path,
    key: str,
    count: int,
    measure: Callable[[Callable[[], None]], np.ndarray],
) -> np.ndarray:
    """Return the lengths of `count` samples cached under `key`. If missing, `measure` counts them
    in one process while others wait.

    Raises:
        MachineError: the cache cannot be written, or the counter hangs; whatever `measure` raises.
    """
    path = cache / f"{key}.lengths.npy"
    found = _load_lengths(path, count)
    if found is not None:
        return found
    with hold_build_lock(cache / f"{key}.lock") as heartbeat:
        found = _load_lengths(path, count)
        if found is None:
            found = measure(heartbeat)
            _save_lengths(path, found)
            _LOG.info("counted the tokens of %d samples into %s", count, path)
    return found


def _load_lengths(path: Path, count: int) -> np.ndarray | None:
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError):  # missing, or damaged by a crash: count again
        return None
    return found if found.shape == (count,) and found.dtype == np.int32 else None


def _save_lengths(path: Path, lengths: np.ndarray) -> None:
    try:
        with replace_atomically(path) as file:
            np.save(file, lengths)
    except OSError as error:
        raise make_write_error(path, error, "the lengths of samples") from error
