"""A measurement that was disturbed: less work never takes longer than more."""

from __future__ import annotations

import pytest
import torch

import gpumix
from gpumix.hardware.device import open_device
from gpumix.profiler.class_settings import ClassSettings
from gpumix.profiler.compute import class_measurement
from gpumix.profiler.compute.class_measurement import measure_class
from gpumix.profiler.compute.sweep import Sweep
from gpumix.profiler.subject import Workload
from gpumix.schema.cluster.cluster import DeviceClass
from helpers.extended import every_third
from helpers.training.models import ARCHITECTURES, LENGTH

BATCH = 2
STALL_S = 100.0


@pytest.mark.parametrize("part", every_third(["forward", "backward", "gradient"]))
def test_a_time_above_that_of_more_work_is_lowered_to_it(monkeypatch, part):
    found: list[Sweep] = []
    sweep = class_measurement.sweep

    def disturbed(*arguments, **options) -> Sweep:
        found.append(sweep(*arguments, **options))
        seconds = getattr(found[0].points[0], f"{part}_s")
        for kind in seconds:
            seconds[kind] += STALL_S
        return found[0]

    monkeypatch.setattr(class_measurement, "sweep", disturbed)
    architecture = ARCHITECTURES["gpt2"]
    generator = torch.Generator().manual_seed(1)
    subject = Workload(
        build=lambda: gpumix.build(architecture.factory, seed=0),
        make_batch=lambda n: architecture.batch(n, generator),
        optimizer_of=torch.optim.AdamW,
        sequence_length=LENGTH,
        global_batch=BATCH,
        budget_s=20,
        settings=ClassSettings({"cpu": "fp32"}),
    )
    with open_device(DeviceClass(name="cpu", accelerator="cpu", memory_bytes=2**26), 0) as runtime:
        made = measure_class(subject, runtime, device_class="cpu", progress=lambda line: None)
    assert made.device_class.disturbed() == ""
    for times in made.device_class.units.values():
        curve = getattr(times, part)
        if curve is not None:
            assert curve.values[0] <= curve.values[1] < STALL_S
