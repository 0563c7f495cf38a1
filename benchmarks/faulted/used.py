"""Which samples a run used, as `traps` has its ranks tell."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Done:
    """A step that a rank did: in which start of the run, until when, and with which samples."""

    start: int
    step: int
    rank: int
    at: float
    samples: tuple[int, ...]


def done_in(folder: Path) -> list[Done]:
    found = []
    for file in folder.glob("used-*.jsonl"):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut short when its rank was killed
                told = json.loads(line)
                found.append(Done(**told | {"samples": tuple(told["samples"])}))
    return found


def lost_and_repeated(done: Iterable[Done], truth: Iterable[Done]) -> tuple[int, int]:
    """How many samples a run did not use that the true one did, and how many it used besides."""
    used, lost, repeated = _samples(done), 0, 0
    for step, wanted in _samples(truth).items():
        own = used.get(step, Counter())
        lost += (wanted - own).total()
        repeated += (own - wanted).total()
    return lost, repeated


def _samples(done: Iterable[Done]) -> dict[int, Counter[int]]:
    """By step; of one that was done again the last time counts, for the run went on from it."""
    done = list(done)
    last: dict[int, int] = {}
    for one in done:
        last[one.step] = max(last.get(one.step, 0), one.start)
    found: dict[int, Counter[int]] = {step: Counter() for step in last}
    for one in done:
        if one.start == last[one.step]:
            found[one.step].update(one.samples)
    return found
