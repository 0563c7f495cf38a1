"""A dataset whose samples show where they belong, loaders of it, and the workers of these."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpumix.data.loader import Loader
from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.workers.worker_pool import ProcessWorkerPool

N = 200


class Squares:
    """Sample k holds k and its square; nothing of it can be pickled."""

    def __init__(self, n: int = N, read: Callable[[int], None] = lambda k: None) -> None:
        self.n = n
        self.read = read
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> dict[str, Any]:
        self.read(k)
        return {"k": k, "square": torch.full((3,), float(k * k))}


def processes(dataset: Any, shares: list[int] = [6, 2], rank: int = 0, **given: Any) -> Loader:  # noqa: B006
    return Loader(dataset, shares, rank, **{"num_workers": 2, "kind": "processes"} | given)


def take(loader: Loader, steps: int) -> list[int]:
    found = []
    for _ in range(steps):
        batch = next(loader)
        assert torch.equal(batch["square"][:, 0], batch["k"].float() ** 2)
        found += batch["k"].tolist()
    return found


def expected(steps: int, *, begin: int = 0, stop: int = 6, batch: int = 8) -> list[int]:
    order = GlobalOrder(N, 0)
    spans = [order.span(s * batch + begin, s * batch + stop) for s in range(steps)]
    return [int(k) for span in spans for k in span]


def pids(loader: Loader) -> list[int]:
    crew = loader._feed._crew
    assert isinstance(crew, ProcessWorkerPool)
    return crew.pids


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()
