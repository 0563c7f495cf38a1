"""A run's `progress.json`, for those who watch it from outside. Nothing here imports torch."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from gpumix.spec.errors import ENDED_AT_ONCE
from gpumix.spec.files import MARK_BYTES, read_text, write_at_once, write_in_place
from gpumix.train import run_files


def mark_failed(folder: Path, why: str) -> None:
    """Say in the `progress.json` of a run whose ranks have ended that it does not train any more,
    which none of them may have been able to, and why: the one who writes may only know that its
    peers did not answer."""
    _mark(folder, "failed", why, after=("training", "restarting", "failed"))


def mark_stopped(folder: Path) -> None:
    """Say there that somebody ended the run at once: its ranks had no time to say so."""
    _mark(folder, "interrupted", ENDED_AT_ONCE, after=("training", "restarting", "failed"))


def mark_restarting(folder: Path, why: str) -> None:
    """Say there that a run which failed, or one of whose ranks was asked to end, starts again by
    itself."""
    _mark(folder, "restarting", why, after=("training", "failed", "interrupted"))


def _mark(folder: Path, state: str, why: str, *, after: tuple[str, ...]) -> None:
    path = folder / run_files.PROGRESS
    with suppress(OSError, ValueError, KeyError, TypeError):
        value = json.loads(read_text(path, MARK_BYTES))
        if value["state"] in after:
            now = {"state": state, "why": why, "time": time.time()}
            _write_where_room_is(path, json.dumps(value | now) + "\n")


def _write_where_room_is(path: Path, text: str) -> None:
    """As `write_at_once`; on a disk that is full in the place of what the file held."""
    try:
        write_at_once(path, text)
    except OSError:
        write_in_place(path, text)


def last_heard(folder: Path) -> float | None:
    """When a run said something last (`time.time()`), by its `progress.json`."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(read_text(folder / run_files.PROGRESS, MARK_BYTES))
        return float(told["time"])
    return None


def last_failure(folder: Path) -> str:
    """Why a run has failed, by its `progress.json`; empty if it says of none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(read_text(folder / run_files.PROGRESS, MARK_BYTES))
        return str(told["why"]) if told["state"] == "failed" else ""
    return ""
