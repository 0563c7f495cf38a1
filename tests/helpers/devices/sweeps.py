"""A model whose blocks say what they cost, and how far the sweep over micro-batches goes with it.

Time is virtual, so what is measured is exact, and the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import gpumix
from gpumix.hardware.device import DeviceRuntime
from gpumix.hardware.emulation import pacer
from gpumix.hardware.emulation.pacer import Pacer
from gpumix.profiler.class_settings import ClassSettings
from gpumix.profiler.compute import sweep
from gpumix.profiler.compute.class_measurement import measure_class
from gpumix.profiler.subject import Workload
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.profile.measurements import ClassMeasurement
from gpumix.schema.profile.profile import ROOT
from helpers.training.models import WIDTH, Batch, Regression
from helpers.virtual_clock import VirtualClock

ROWS = 4
Cost = Callable[[Tensor], object]
"""Called with what goes into a block, whose first dimension are the samples."""


class CostlyBlock(nn.Module):
    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.cost = cost

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):  # what is computed of that takes no device's time
            self.cost(x)
        return x + self.linear(x)


def costly_model(cost: Cost) -> nn.Module:
    return Regression([CostlyBlock(cost) for _ in range(2)])


def some_batch(samples: int) -> Batch:
    return {"x": torch.randn(samples, ROWS, WIDTH), "target": torch.randn(samples, ROWS, 4)}


@contextmanager
def virtual_time() -> Iterator[VirtualClock]:
    """The profiler, and emulated devices that are opened inside, go by this clock."""
    clock = VirtualClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "time", SimpleNamespace(perf_counter=clock))
        patch.setattr(pacer, "Pacer", partial(Pacer, clock=clock, sleep=clock.sleep))
        yield clock


def measure(
    runtime: DeviceRuntime,
    model: Callable[[], nn.Module],
    *,
    largest: int,
    budget_s: float = 1e9,
    make_batch: Callable[[int], Batch] = some_batch,
    progress: Callable[[str], None] = lambda line: None,
) -> ClassMeasurement:
    """What `gpumix profile` measures on one device, up to `largest` samples."""
    measured = subject(model, largest=largest, budget_s=budget_s, make_batch=make_batch)
    return measure_class(measured, runtime, device_class="one", progress=progress)


def profile_json(
    model: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    *,
    length: int,
    global_batch: int,
    cluster: Cluster,
) -> str:
    """The profile of a whole cluster, on one of its ranks."""
    profile = gpumix.profile(
        model,
        make_batch,
        sequence_length=length,
        global_batch_size=global_batch,
        cluster=cluster,
        budget_s=20,
        progress=lambda line: None,
    )
    return profile.model_dump_json()


def subject(
    model: Callable[[], nn.Module],
    *,
    largest: int,
    budget_s: float = 1e9,
    make_batch: Callable[[int], Batch] = some_batch,
) -> Workload:
    return Workload(
        build=model,
        make_batch=make_batch,
        optimizer_of=partial(torch.optim.SGD, lr=0.1),
        sequence_length=ROWS,
        global_batch=largest,
        budget_s=budget_s,
        settings=ClassSettings({"one": "fp32"}),
    )


def sizes(found: ClassMeasurement) -> list[int]:
    """The micro-batches that were recorded, the same ones in every curve."""
    measured = found.device_class
    root, kind = found.model.root, found.model.kinds[0]
    curves = [kind.kept, kind.saved, kind.gradient, kind.forward, kind.backward]
    curves += [kind.saved_forward, kind.saved_backward, root.kept, root.head]
    curves += [c for unit in measured.units.values() for c in (unit.forward, unit.backward)]
    curves += [
        c for c in (root.chunked_cross_entropy, measured.chunked_cross_entropy) if c is not None
    ]
    curves += [unit.gradient for name, unit in measured.units.items() if name != ROOT]
    (same,) = {curve.sizes for curve in curves}
    assert measured.largest_micro_batch == same[-1]
    assert ROOT in measured.units
    return [int(size) for size in same]
