"""Is the sequence of samples the same whoever reads it, and whatever happens on the way?

The samples of a run are hashed over 1 to 4 ranks with equal and unequal shares, 0 to 4 workers that
are threads or processes, a resume in mid-epoch on other ranks, a new plan in mid-run, and workers
that are killed. There should be one hash; that of the order itself, computed at once, is the truth.

    python benchmarks/order.py --json
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import common
from gpumix.data.crew import Kind, Processes
from gpumix.data.loader import Loader
from gpumix.data.order import GlobalOrder

SAMPLES, BATCH, STEPS, SEED = 997, 24, 60, 3  # more than an epoch
SHARES = ((24,), (12, 12), (17, 7), (8, 8, 8), (20, 0, 4), (6, 6, 6, 6), (15, 5, 3, 1))
WORKERS: tuple[tuple[int, Kind], ...] = (
    *((0, "threads"), (1, "threads"), (3, "threads")),
    *((1, "processes"), (2, "processes"), (4, "processes")),
)
EVENTS = ("nothing", "resume", "replan", "killed")


class Numbers:
    """Sample k is k, and a number that goes by it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"k": k, "seven": torch.full((3,), 7 * k)}


@dataclass(frozen=True)
class Configuration:
    shares: tuple[int, ...]
    workers: int
    kind: Kind
    event: str

    def open(self, shares: tuple[int, ...]) -> list[Loader]:
        return [
            Loader(Numbers(), list(shares), rank, seed=SEED, workers=self.workers, kind=self.kind)
            for rank in range(len(shares))
        ]

    def run(self) -> str:
        """The hash of all samples, step by step in rank order."""
        found = hashlib.sha256()
        for batch in self._batches():
            assert torch.equal(batch["seven"][:, 0], 7 * batch["k"])
            found.update(batch["k"].numpy().tobytes())
        return found.hexdigest()

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        other = SHARES[(SHARES.index(self.shares) + 3) % len(SHARES)]
        loaders = self.open(self.shares)
        for step in range(STEPS):
            if step == STEPS // 3 and self.event == "resume":
                state = loaders[-1].state_dict()
                _close(loaders)
                loaders = self.open(other)
                for loader in loaders:
                    next(loader)  # it has begun elsewhere
                    loader.load_state_dict(state)
            if step == STEPS // 3 and self.event == "replan":
                loaders = _replanned(loaders, self, other)
            if step % 20 == 10 and self.event == "killed":
                _kill_one(loaders[0])
            for loader in loaders:
                yield next(loader)
        _close(loaders)


def _replanned(loaders: list[Loader], of: Configuration, shares: tuple[int, ...]) -> list[Loader]:
    """Ranks that stay take new shares, others come or go."""
    state = loaders[0].state_dict()
    stay, go = loaders[: len(shares)], loaders[len(shares) :]
    for loader in stay:
        loader.replan(list(shares))
    _close(go)
    come = of.open(shares)[len(stay) :]
    for loader in come:
        loader.load_state_dict(state)
    return [*stay, *come]


def _kill_one(loader: Loader) -> None:
    crew = loader._feed._crew
    if isinstance(crew, Processes):
        os.kill(crew.pids[0], signal.SIGKILL)


def _close(loaders: list[Loader]) -> None:
    for loader in loaders:
        loader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="figures as one line of JSON")
    options = parser.parse_args()
    truth = GlobalOrder(SAMPLES, SEED).span(0, BATCH * STEPS)
    hashes = {hashlib.sha256(truth.tobytes()).hexdigest()}
    every = [
        Configuration(shares, workers, kind, event)
        for shares, (workers, kind), event in product(SHARES, WORKERS, EVENTS)
        if event != "killed" or kind == "processes"
    ]
    for number, one in enumerate(every, start=1):
        hashes.add(one.run())
        if number % 20 == 0:
            print(f"{number} of {len(every)} configurations, {len(hashes)} hash(es)", flush=True)
    common.print_figures(
        {"configurations": len(every), "distinct_hashes": len(hashes)}, as_json=options.json
    )


if __name__ == "__main__":
    main()
