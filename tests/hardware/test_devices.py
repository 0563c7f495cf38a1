"""Emulated and plain CPU devices have one interface; opening and closing leaves no trace."""

from __future__ import annotations

import pickle

import pytest
import torch

from gpumix.hardware.device import open_device
from gpumix.hardware.memory_limit import limit_memory
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.errors import InputError, MachineError
from helpers.devices.fake_devices import emulated_class
from helpers.errors import raises

pytestmark = pytest.mark.usefixtures("no_garbage")

CPU = DeviceClass(name="cpu", accelerator="cpu", memory_bytes=2**24)
GPU = DeviceClass(name="rtx-3090", accelerator="cuda", memory_bytes=24 * 2**30)


def in_use() -> int:
    """Tensors of other tests may live on; caps are set above them."""
    limit = limit_memory(None)
    if not limit.exact:
        pytest.skip(f"bytes cannot be counted here: {limit.why_inexact}")
    return limit.current_bytes


def test_an_emulated_device_has_one_thread_and_gives_the_others_back():
    threads = torch.get_num_threads()
    with open_device(emulated_class(memory_bytes=in_use() + 2**20), 0):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


def test_an_emulated_device_limits_memory_in_its_own_name():
    small = emulated_class(memory_bytes=in_use() + 1000)
    with (
        open_device(small, 0),
        pytest.raises(torch.OutOfMemoryError, match="emulated device 'small' is out of memory"),
    ):
        torch.empty(1001, dtype=torch.uint8)
    torch.empty(1001, dtype=torch.uint8)


@pytest.mark.parametrize("device_class", [CPU, emulated_class()], ids=lambda c: c.name)
def test_devices_on_a_cpu_count_their_tensors(device_class):
    roomy = device_class.model_copy(update={"memory_bytes": in_use() + 2**20})
    with open_device(roomy, 0) as device:
        before = device.current_bytes()
        device.reset_peak()
        kept = torch.empty(1000, device=device.torch_device)
        torch.empty(500)
        assert device.current_bytes() - before == 4 * kept.numel()
        assert device.peak_bytes() - before == 6000
        assert device.memory_limit_bytes == roomy.memory_bytes
        assert device.framework_bytes() == 0
        device.idle()
        device.synchronize()
        assert (device.overruns, device.overrun_s) == (0, 0.0)
        with pytest.raises(torch.OutOfMemoryError, match=f"device '{roomy.name}'"):
            torch.empty(2**20)
    torch.empty(2**20)


def test_an_emulated_device_reports_when_the_cpu_was_too_slow():
    impossible = emulated_class(emulate_flops_per_s=1e18, memory_bytes=in_use() + 2**26)
    side = 1024
    a = torch.ones(side, side)
    with open_device(impossible, 0) as device:
        for _ in range(100):
            a @ a
            if device.overruns:
                break
        assert device.overruns > 0
        assert device.overrun_s > 0


def test_a_process_uses_one_device_at_a_time():
    roomy = CPU.model_copy(update={"memory_bytes": in_use() + 2**20})
    with open_device(roomy, 0):
        with raises(InputError, code="device-already-open", what="small"):
            open_device(emulated_class(), 0)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**20)
    with open_device(emulated_class(memory_bytes=in_use() + 2**20), 0):
        pass


def test_gaudi_is_planned_for_and_not_trained_on():
    gaudi = DeviceClass(name="gaudi2", accelerator="hpu", memory_bytes=96 * 2**30)
    assert gaudi.maker == "Habana"
    with raises(MachineError, code="device-only-planned", what="gaudi2"):
        open_device(gaudi, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_does_not_see_is_an_error_with_a_fix():
    with raises(MachineError, code="torch-without-gpu") as raised:
        open_device(GPU, 0)
    assert raised.value.exit_code == 3
    assert "nvidia-smi" in pickle.loads(pickle.dumps(raised.value)).fix
