"""GPUs of AMD and Intel are found by torch: over a made-up torch, and once by the real one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpumix.hardware import runtime
from gpumix.hardware.discovery import discover as discovery
from gpumix.hardware.discovery import torch_gpus
from gpumix.hardware.discovery.cuda_visible_devices import Gpu
from gpumix.hardware.discovery.discover import discover_cluster
from gpumix.hardware.discovery.torch_gpus import find_torch_gpus, has_gpu_signs, query_torch
from gpumix.hardware.estimates.cluster_shorthand import find_class_card
from gpumix.schema.errors import MachineError
from gpumix.schema.plan.dtypes import get_dtype_support
from helpers.devices.fake_devices import FakeNvml, built_for
from helpers.errors import raises

GIB = 2**30
HIP_UUID = "35663062-3061-3937-6635-363062306139"  # HIP's 16 digits, as bytes


def amd(index):
    return SimpleNamespace(
        name="AMD Instinct MI300X",
        total_memory=192 * GIB,
        uuid=HIP_UUID[:-1] + str(index),
        gcnArchName="gfx942:sramecc+:xnack-",
    )


def intel(index):
    return SimpleNamespace(
        name="Intel(R) Arc(TM) B580 Graphics",
        total_memory=12 * GIB,
        driver_version="1.6.33276",
        architecture=0x500400400,  # 20.1.4
        uuid="00000000-0000-0000-0000-000000000000",
    )


@pytest.fixture
def machine(monkeypatch):
    """A torch built for a maker, on a host of some of its GPUs."""
    FakeNvml(init_error="LibraryNotFound").install(monkeypatch)

    def install(toolkit, gpus):
        kind = "xpu" if toolkit == "XPU" else "cuda"
        module = SimpleNamespace(
            device_count=lambda: len(gpus),
            is_available=lambda: bool(gpus),
            is_initialized=lambda: False,
            get_device_properties=lambda index: gpus[index],
            init=lambda: (_ for _ in ()).throw(RuntimeError("No HIP GPUs are available")),
        )
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(torch.version, "hip", "7.1.5" if toolkit == "ROCm" else None)
        monkeypatch.setattr(torch_gpus, "_query_in_subprocess", query_torch)
        return built_for(monkeypatch, toolkit, "7.1.5")

    return install


def test_amds(machine):
    machine("ROCm", [amd(1), amd(2)])
    cluster = discover_cluster()
    (kind,) = cluster.classes
    assert (kind.name, kind.accelerator, kind.maker) == ("mi300x", "cuda", "AMD")
    assert (kind.gfx_target, kind.compute_capability) == ("gfx942", "")
    assert (kind.memory_bytes, kind.driver) == (192 * GIB, "7.1.5")
    assert [(d.id, d.ordinal) for d in cluster.devices] == [
        (f"GPU-{HIP_UUID[:-1]}1", 0),
        (f"GPU-{HIP_UUID[:-1]}2", 1),
    ]


@pytest.mark.parametrize(
    ("architecture", "target"),
    [
        (0x30DC00800, "dg2"),  # SYCL's intel_gpu_acm_g10
        (0x30F000700, "pvc"),  # intel_gpu_pvc
        (0x500400400, "bmg"),
        (0x300000000, ""),  # intel_gpu_tgllp, without matrix engines
        (0, ""),
    ],
)
def test_intels_architectures(machine, architecture, target):
    found = intel(0)
    found.architecture = architecture
    machine("XPU", [found])
    (kind,) = discover_cluster().classes
    assert kind.xe_target == target
    assert get_dtype_support(kind).usual == ("bf16" if target else "fp32")


def test_intels_whose_driver_tells_no_uuid(machine):
    machine("XPU", [intel(0), intel(1)])
    cluster = discover_cluster()
    (kind,) = cluster.classes
    assert (kind.accelerator, kind.maker, kind.driver) == ("xpu", "Intel", "1.6.33276")
    assert (kind.name, kind.xe_target, kind.gfx_target) == ("arc-b580", "bmg", "")
    assert get_dtype_support(kind).usual == "bf16"
    assert find_class_card(kind).name == "b580"
    host = cluster.devices[0].host
    assert [d.id for d in cluster.devices] == [f"{host}-gpu-0", f"{host}-gpu-1"]


@pytest.mark.parametrize(
    ("variables", "seen", "wrong"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, 1, {}),
        ({"ROCR_VISIBLE_DEVICES": "GPU-5f0ba,GPU-77"}, 2, {}),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "2"}, 1, {}),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, 1, {}),
        (
            {"HIP_VISIBLE_DEVICES": "0,7"},
            1,
            {"code": "visible-devices-count", "what": ("HIP_VISIBLE_DEVICES", 2, 1)},
        ),
        (
            {"HIP_VISIBLE_DEVICES": "0,0"},
            1,
            {"code": "visible-devices-count", "what": ("HIP_VISIBLE_DEVICES", 2, 1)},
        ),
        (
            {"ROCR_VISIBLE_DEVICES": "GPU-none"},
            0,
            {"code": "visible-devices-count", "what": ("ROCR_VISIBLE_DEVICES", 1)},
        ),
        (
            {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"},
            1,
            {"code": "visible-devices-disagree"},
        ),
    ],
)
def test_amds_variables(machine, monkeypatch, variables, seen, wrong):
    machine("ROCm", [amd(n) for n in range(seen)])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not wrong:
        assert len(discover_cluster().devices) == seen
        return
    with raises(MachineError, **wrong):
        discover_cluster()


@pytest.mark.parametrize(("mask", "wrong"), [("1", False), ("0.0,0.1", False), ("0,1", True)])
def test_intels_variable(machine, monkeypatch, mask, wrong):
    machine("XPU", [intel(0)])
    monkeypatch.setenv("ZE_AFFINITY_MASK", mask)
    if wrong:
        with raises(MachineError, code="visible-devices-count", what=("ZE_AFFINITY_MASK", 2)):
            discover_cluster()
    else:
        assert len(discover_cluster().devices) == 1


def test_nvidias_without_nvml(monkeypatch):
    """On a Jetson the bus has no card either; a node of the driver is the sign."""
    FakeNvml(init_error="LibraryNotFound").install(monkeypatch)
    gpu = Gpu(0, "GPU-1", "Orin", 8 * GIB, "", "8.7")
    monkeypatch.setattr(discovery, "find_torch_gpus", lambda host, toolkit: ((gpu,), ""))
    assert discover_cluster().classes[0].accelerator == "cpu"
    monkeypatch.setattr(discovery, "has_gpu_signs", lambda: True)
    assert discover_cluster().classes[0].product == "Orin"


def test_the_signs_of_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_gpus, "_DEVICE_NODES", (tmp_path / "nvidiactl",))
    monkeypatch.setattr(runtime, "is_available", lambda: False)
    assert not has_gpu_signs()
    (tmp_path / "nvidiactl").touch()
    assert has_gpu_signs()


def test_amds_that_are_hidden(machine, monkeypatch):
    machine("ROCm", [])
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    assert discover_cluster().classes[0].accelerator == "cpu"


def test_why_there_is_none(machine):
    machine("ROCm", [])
    assert query_torch("here") == {"gpus": [], "why": "No HIP GPUs are available"}


def test_a_gpu_is_checked_against_its_class(machine, monkeypatch):
    from gpumix.hardware.device import open_device

    machine("ROCm", [amd(1)])
    (kind,) = discover_cluster().classes
    monkeypatch.setattr(runtime, "device_name", lambda device: "AMD Instinct MI250X")
    with raises(MachineError, code="gpu-of-another-class", what=(0, "MI250X", "gfx942")):
        open_device(kind, 0)


@pytest.mark.extended
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_the_torch_that_is_here_is_asked_in_a_process_of_its_own():
    gpus, why = find_torch_gpus("here", "")
    assert gpus == () and why == "this torch is built for CPUs only"


def test_a_torch_that_fails_is_told_with_its_words(monkeypatch):
    monkeypatch.setattr(torch_gpus, "__name__", "gpumix.nowhere")
    with raises(MachineError, code="torch-gpu-query-failed") as raised:
        find_torch_gpus("here", "ROCm")
    assert "gpumix.nowhere" in raised.value.why
