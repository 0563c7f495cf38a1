"""Time and host memory of reading weights, beside the prediction of the plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpumix.cost.loading_memory import predict_host_bytes
from gpumix.engine.engine import Engine
from gpumix.hardware import runtime
from gpumix.hardware.host.resident_memory import PeakMemory
from gpumix.schema.units import show_bytes, show_seconds


@dataclass
class LoadingCost:
    """Time and growth of memory while an engine was made."""

    seconds: float = 0.0
    grown_bytes: int = 0

    def describe(self, engine: Engine) -> str:
        """Return a line on the slowest rank and the host with the highest peak. Collective."""
        comm, plan = engine.comm, engine.plan
        own = [self.grown_bytes, int(1e3 * self.seconds)]
        row = torch.tensor(own, dtype=torch.int64, device=comm.device)
        table = comm.exchanged(row, "memory of loading").tolist()
        taken = Counter[str]()
        for worker, (grown, _) in zip(plan.workers, table):
            taken[worker.host] += grown
        [(host, most)] = taken.most_common(1)
        planned = predict_host_bytes(plan, on_cpu=not runtime.is_gpu(comm.device)).get(host, 0)
        seconds = show_seconds(max(milliseconds for _, milliseconds in table) / 1e3)
        told = f"weights read in {seconds}, with {show_bytes(most)} of RAM on host {host} at most"
        return f"{told} ({show_bytes(planned)} were planned)" if planned else told


@contextmanager
def measure_loading() -> Iterator[LoadingCost]:
    """Measure time and memory inside the context; the cost is valid after it."""
    cost, begun = LoadingCost(), time.perf_counter()
    with PeakMemory() as memory:
        yield cost
    cost.grown_bytes, cost.seconds = memory.grown_bytes, time.perf_counter() - begun
