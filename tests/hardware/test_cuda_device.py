"""A GPU over a fake of what torch says of it: which GPU it takes and how much memory it allows."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from gpumix.hardware import runtime
from gpumix.hardware.device import open_device
from gpumix.hardware.discovery.gpu_health import GpuHealth
from gpumix.hardware.host.environment import ALLOCATORS
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.errors import MachineError
from helpers.errors import raises

GIB = 2**30
TOTAL = 24 * GIB
CONTEXT = GIB // 2
WORKSPACES = 64 * 2**20  # of two threads, as on Hopper
PRODUCTS = ["NVIDIA H100 PCIe", "NVIDIA GeForce RTX 3090"]


class FakeCuda:
    """Two GPUs of 24 GiB, numbered fastest first as CUDA does."""

    def __init__(self, monkeypatch):
        self.fraction = None
        self.current = None
        self.elsewhere = 0  # bytes that other processes hold
        self.reserved = WORKSPACES
        self.allocated = WORKSPACES
        replaced = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "get_device_properties": lambda ordinal: SimpleNamespace(
                name=PRODUCTS[ordinal], uuid=f"uuid-{ordinal}", total_memory=TOTAL
            ),
            "get_device_capability": lambda ordinal: [(9, 0), (8, 6)][ordinal],
            "set_per_process_memory_fraction": self.set_fraction,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(torch.cuda, name, function)
        of_any_maker = {
            "current_accelerator": lambda: torch.device("cuda"),
            "set_device_index": lambda ordinal: setattr(self, "current", ordinal),
            "get_memory_info": lambda device: (
                TOTAL - CONTEXT - self.reserved - self.elsewhere,
                TOTAL,
            ),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.allocated + GIB,
            "max_memory_reserved": lambda device: self.reserved + 2 * GIB,
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
        }
        for name, function in of_any_maker.items():
            monkeypatch.setattr(torch.accelerator, name, function)
        monkeypatch.setattr(runtime, "load_matmul_library", lambda device: WORKSPACES)
        for name in (*ALLOCATORS, "PYTORCH_NVML_BASED_CUDA_CHECK"):
            monkeypatch.setenv(name, "")  # taken back at the end
            monkeypatch.delenv(name)

    def set_fraction(self, fraction, device):
        self.fraction = fraction


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def gpu_class(**changes):
    return DeviceClass(**{"name": "gpu", "accelerator": "cuda", "memory_bytes": TOTAL, **changes})


def test_a_whole_card_is_not_limited(cuda):
    with open_device(gpu_class(), 1) as device:
        assert device.torch_device == torch.device("cuda", 1)
        assert cuda.current == 1
        assert cuda.fraction is None
        assert device.framework_bytes() == CONTEXT + WORKSPACES
        cuda.reserved = 3 * GIB
        assert device.framework_bytes() == CONTEXT + WORKSPACES, "torch's memory is for tensors"


def test_workspaces_of_products_are_no_tensors(cuda):
    """They lie in torch's allocator, which counts them with tensors."""
    with open_device(gpu_class(), 1) as device:
        assert device.current_bytes() == 0
        cuda.allocated += 3 * GIB
        assert device.current_bytes() == 3 * GIB
        assert device.peak_bytes() == 4 * GIB
        cuda.reserved = 4 * GIB
        assert device.peak_reserved_bytes() == 6 * GIB


def test_a_class_with_less_memory_is_enforced_context_included(cuda):
    with open_device(gpu_class(memory_bytes=8 * GIB), 0) as device:
        assert device.memory_limit_bytes == 8 * GIB
        assert cuda.fraction * TOTAL == pytest.approx(8 * GIB - CONTEXT)
        assert device.memory_limit_bytes - device.framework_bytes() == pytest.approx(
            cuda.fraction * TOTAL - WORKSPACES
        )
    assert cuda.fraction == 1.0


def test_obtainable_memory_is_not_held_by_others(cuda):
    with open_device(gpu_class(memory_bytes=20 * GIB), 0) as device:
        assert device.obtainable_bytes() == 20 * GIB
        cuda.reserved, cuda.elsewhere = 3 * GIB, 12 * GIB
        assert device.obtainable_bytes() == 12 * GIB - CONTEXT - WORKSPACES
        cuda.elsewhere = TOTAL - CONTEXT - cuda.reserved
        assert device.obtainable_bytes() == 3 * GIB - WORKSPACES


def test_a_smaller_class_has_its_memory_beside_others_that_were_there(cuda, monkeypatch):
    """The driver tells what they hold before this process has a context."""
    cuda.elsewhere = 10 * GIB

    def told(makers):
        (device,) = makers
        yield device, GpuHealth(index=0, memory_bytes=TOTAL, used_bytes=cuda.elsewhere)

    monkeypatch.setattr("gpumix.hardware.device.read_gpu_health", told)
    with open_device(gpu_class(memory_bytes=8 * GIB), 0) as device:
        assert device.framework_bytes() == CONTEXT + WORKSPACES
        assert cuda.fraction * TOTAL == pytest.approx(8 * GIB - CONTEXT)
        cuda.elsewhere = 20 * GIB
        left = 4 * GIB - CONTEXT - WORKSPACES
        assert device.obtainable_bytes() == left
    cuda.elsewhere = 20 * GIB
    with open_device(gpu_class(memory_bytes=8 * GIB), 0) as device:
        assert device.framework_bytes() == 8 * GIB - left, "more than the class can do without"
        assert cuda.fraction * TOTAL == pytest.approx(left + WORKSPACES)
        cuda.elsewhere = 0
        assert device.framework_bytes() == 0


def test_a_card_without_memory_to_start_is_told(cuda, monkeypatch):
    def full(device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB.")

    monkeypatch.setattr(runtime, "load_matmul_library", full)
    with raises(MachineError, code="gpu-memory-full", what=0) as raised:
        open_device(gpu_class(), 0)
    assert "CUDA_VISIBLE_DEVICES" in raised.value.fix


def test_what_the_driver_keeps_of_the_nominal_memory_is_not_for_tensors(cuda):
    nominal = TOTAL + GIB // 4
    with open_device(gpu_class(memory_bytes=nominal), 0) as device:
        assert nominal - device.framework_bytes() == TOTAL - CONTEXT - WORKSPACES


def test_a_uuid_finds_the_gpu_whatever_its_number(cuda):
    for ordinal, name in [(0, "GPU-uuid-1"), (1, "my old card")]:
        with open_device(gpu_class(), ordinal, device_id=name):
            assert cuda.current == 1


@pytest.mark.parametrize(("ordinal", "device_id"), [(2, ""), (0, "GPU-elsewhere")])
def test_a_gpu_that_is_not_there_is_an_error(cuda, ordinal, device_id):
    with raises(MachineError, code="gpu-not-visible"):
        open_device(gpu_class(), ordinal, device_id=device_id)


def test_a_discovered_class_must_be_what_is_there(cuda):
    rtx = gpu_class(product="NVIDIA GeForce RTX 3090", compute_capability="8.6")
    open_device(rtx, 1).close()
    with raises(MachineError, code="gpu-of-another-class", what=(0, "H100", "9.0")) as raised:
        open_device(rtx, 0)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in raised.value.fix


def test_its_allocator_grows_segments_unless_the_user_chose(cuda, monkeypatch):
    with open_device(gpu_class(), 0):
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    for name in ALLOCATORS:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.setenv(name, "max_split_size_mb:128")
        with open_device(gpu_class(), 0):
            assert [one for one in ALLOCATORS if one in os.environ] == [name]
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    with open_device(gpu_class(), 0):
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "0"


def test_a_driver_that_cannot_grow_segments_keeps_them_fixed(cuda, monkeypatch):
    """As those of some virtual GPUs; where the user chose, the error stays."""
    settings = []

    def load_products(device):
        if not settings:
            raise RuntimeError("CUDA driver error: operation not supported")
        return WORKSPACES

    monkeypatch.setattr(runtime, "load_matmul_library", load_products)
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False
    )
    with open_device(gpu_class(), 0) as device:
        assert device.framework_bytes() == CONTEXT + WORKSPACES
    assert settings == ["expandable_segments:False"] == [os.environ["PYTORCH_ALLOC_CONF"]]
    settings.clear()
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(RuntimeError, match="operation not supported"):
        open_device(gpu_class(), 0)
