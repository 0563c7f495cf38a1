"""What a probe measures of a GPU, on a CPU that stands for one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from gpumix.check.facts.cluster import GpuSpeed
from gpumix.check.probes import probe
from gpumix.check.probes.probe import ProbeSettings, RankProbe
from gpumix.hardware.device import DeviceRuntime
from gpumix.profiler.compute import peak_flops
from gpumix.schema.cluster.cluster import Device, DeviceClass
from gpumix.schema.errors import MachineError
from gpumix.train.processes.local_launcher import RankAddress
from helpers.errors import raises

GPU = DeviceClass(name="big", accelerator="cuda", memory_bytes=2**30)
SEAT = RankAddress(0, 1, Device(id="big-0", device_class="big"), port=0)


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(probe, "LOADED_ROWS", 128)
    monkeypatch.setattr(probe, "COPIED_BYTES", 2**20)
    monkeypatch.setitem(peak_flops.MAX_MATRIX_ROWS, "cpu", 128)
    found = RankProbe(SEAT, ProbeSettings(GPU))
    found._runtime = SimpleNamespace(
        torch_device=torch.device("cpu"), memory_limit_bytes=2**30, synchronize=lambda: None
    )
    found._runtime.seconds = partial(DeviceRuntime.seconds, found._runtime)
    return found


def test_the_speed_of_a_device(stand_in):
    found = GpuSpeed.model_validate(stand_in.answer("speed", {}))
    assert found.dtype == "float32"  # before Volta there is nothing faster
    assert found.flops_per_s > 0 and found.memory_bytes_per_s > 0
    assert found.link == (0, 0) and found.reasons == 0  # no driver says anything


def test_a_device_that_others_have_filled(stand_in, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 384.00 MiB")

    monkeypatch.setattr(probe, "measure_peak", full)
    with raises(MachineError, code="gpu-memory-full") as caught:
        stand_in.answer("speed", {})
    assert "nvidia-smi" in caught.value.fix
