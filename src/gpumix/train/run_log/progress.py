"""The `progress.json` of a run, for watchers outside. Imports no torch."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from gpumix.schema.errors import ENDED_AT_ONCE
from gpumix.schema.files import MARK_BYTES, read_text, write_in_place, write_text_atomically
from gpumix.train.run_log import run_files


def mark_failed(folder: Path, why: str) -> None:
    """Mark a run with ended ranks as failed, with the reason. No rank may have been able to, and a
    writing rank may only know that its peers did not answer."""
    _update_state(folder, "failed", why, after=("training", "restarting", "failed"))


def mark_stopped(folder: Path) -> None:
    """Mark a run as ended at once by a person; its ranks had no time to write."""
    _update_state(folder, "interrupted", ENDED_AT_ONCE, after=("training", "restarting", "failed"))


def mark_restarting(folder: Path, why: str) -> None:
    """Mark a run as restarting by itself, after a failure or a request to end a rank."""
    _update_state(folder, "restarting", why, after=("training", "failed", "interrupted"))


def _update_state(folder: Path, state: str, why: str, *, after: tuple[str, ...]) -> None:
    path = folder / run_files.PROGRESS
    with suppress(OSError, ValueError, KeyError, TypeError):
        value = json.loads(read_text(path, MARK_BYTES))
        if value["state"] in after:
            now = {"state": state, "why": why, "time": time.time()}
            _write_even_if_full(path, json.dumps(value | now) + "\n")


def _write_even_if_full(path: Path, text: str) -> None:
    """Write a file like `write_text_atomically`; on a full disk overwrite it in place."""
    try:
        write_text_atomically(path, text)
    except OSError:
        write_in_place(path, text)


def read_last_update(folder: Path) -> float | None:
    """Return the time (`time.time()`) of a run's last update, by `progress.json`."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(read_text(folder / run_files.PROGRESS, MARK_BYTES))
        return float(told["time"])
    return None


def read_last_failure(folder: Path) -> str:
    """Return the reason of a failure from `progress.json`; empty without a failure."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(read_text(folder / run_files.PROGRESS, MARK_BYTES))
        return str(told["why"]) if told["state"] == "failed" else ""
    return ""
