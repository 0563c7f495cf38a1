"""Discovery names the GPUs that CUDA would show, by UUID, in classes; else the CPU."""

from __future__ import annotations

import pytest

from gpumix.hardware.discovery import discover as module
from gpumix.hardware.discovery.discover import discover_cluster, make_class_name
from gpumix.hardware.host import cgroups
from gpumix.hardware.host.cgroups import MemoryGroup
from gpumix.schema.errors import MachineError
from helpers.devices.fake_devices import FakeCard, FakeNvml
from helpers.errors import raises

GIB = 2**30
RTX = "NVIDIA GeForce RTX 3090"
A100 = "NVIDIA A100-SXM4-40GB"


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setattr(module.socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(cgroups, "read_memory_groups", list)
    return FakeNvml().install(monkeypatch)


@pytest.fixture
def mixed(nvml):
    nvml.cards = [
        FakeCard("GPU-aaaa-1", RTX),
        FakeCard("GPU-aabb-2", A100, 40 * GIB, (8, 0), mig=False),
        FakeCard("GPU-cccc-3", RTX),
    ]
    return nvml


def ids(cluster):
    return [d.id for d in cluster.devices]


def test_two_products_are_two_classes(mixed):
    cluster = discover_cluster()
    assert [c.name for c in cluster.classes] == ["rtx-3090", "a100-sxm4-40gb"]
    assert [d.id for d in cluster.members("rtx-3090")] == ["GPU-aaaa-1", "GPU-cccc-3"]
    assert [(d.ordinal, d.host) for d in cluster.devices] == [(i, "node7") for i in range(3)]
    a100 = cluster.class_named("a100-sxm4-40gb")
    assert (a100.accelerator, a100.memory_bytes, a100.product) == ("cuda", 40 * GIB, A100)
    assert (a100.driver, a100.compute_capability) == ("580.65.06", "8.0")
    assert mixed.shutdowns == 1


def test_one_product_with_two_memories_is_two_classes(nvml):
    nvml.cards = [FakeCard("GPU-1", memory=24 * GIB), FakeCard("GPU-2", memory=12 * GIB)]
    assert [c.name for c in discover_cluster().classes] == ["rtx-3090-24gib", "rtx-3090-12gib"]


def test_memories_that_round_to_the_same_are_told_apart(nvml):
    nvml.cards = [FakeCard("GPU-1", memory=24 * GIB), FakeCard("GPU-2", memory=24 * GIB - 1)]
    names = [c.name for c in discover_cluster().classes]
    assert names == [f"rtx-3090-{24 * GIB}b", f"rtx-3090-{24 * GIB - 1}b"]


@pytest.mark.parametrize(
    ("product", "slug"),
    [
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("GeForce GTX 1080 Ti", "gtx-1080-ti"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-generation"),
        ("Quadro RTX 6000", "quadro-rtx-6000"),
    ],
)
def test_classes_are_named_after_products(product, slug):
    assert make_class_name(product) == slug


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("GPU-cccc-3,GPU-aaaa-1", ["GPU-cccc-3", "GPU-aaaa-1"]),
        ("GPU-aab", ["GPU-aabb-2"]),
        ("2,0", ["GPU-cccc-3", "GPU-aaaa-1"]),
        (" 1 , GPU-cc ", ["GPU-aabb-2", "GPU-cccc-3"]),
        ("2,-1,0", ["GPU-cccc-3"]),
    ],
)
def test_cuda_visible_devices_chooses_and_orders(mixed, monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cluster = discover_cluster()
    assert ids(cluster) == expected
    assert [d.ordinal for d in cluster.devices] == list(range(len(expected)))


def test_a_class_is_described_by_what_is_visible(mixed, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-cccc-3")
    assert [c.name for c in discover_cluster().classes] == ["rtx-3090"]


def test_a_number_among_unlike_gpus_is_refused_while_cuda_counts_by_speed(mixed, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with raises(MachineError, code="visible-devices-ambiguous") as raised:
        discover_cluster()
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in raised.value.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert len(ids(discover_cluster())) == 3, "all of them is clear"


def test_a_number_among_like_gpus_is_clear(nvml, monkeypatch):
    nvml.cards = [FakeCard("GPU-1"), FakeCard("GPU-2")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert ids(discover_cluster()) == ["GPU-2"]


@pytest.mark.parametrize(
    ("visible", "what"),
    [
        ("7", {"code": "visible-devices-unmatched", "what": 7}),
        ("GPU-zz", {"code": "visible-devices-unmatched", "what": "GPU-zz"}),
        ("GPU-aa", {"code": "visible-devices-unmatched", "what": ("GPU-aa", 2)}),
        ("GPU-aaaa-1,GPU-aaaa-1", {"code": "visible-devices-twice"}),
        ("MIG-1234", {"code": "mig-unsupported"}),
    ],
)
def test_what_cuda_would_drop_silently_is_an_error(mixed, monkeypatch, visible, what):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with raises(MachineError, **what):
        discover_cluster()


def test_a_gpu_in_mig_mode_is_refused_unless_hidden(mixed, monkeypatch):
    mixed.cards[1].mig = True
    with raises(MachineError, code="mig-unsupported") as raised:
        discover_cluster()
    assert raised.value.where == "node7, GPU 1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa-1")
    assert ids(discover_cluster()) == ["GPU-aaaa-1"]


@pytest.mark.parametrize("error", ["LibraryNotFound", "DriverNotLoaded"])
def test_without_a_driver_it_is_the_cpu(nvml, monkeypatch, tmp_path, error):
    nvml.init_error = error
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 20971520 kB\nMemAvailable: 1000 kB\n")
    monkeypatch.setattr(module, "_MEMINFO", meminfo)
    cluster = discover_cluster()
    (cpu,) = cluster.classes
    assert (cpu.name, cpu.accelerator, cpu.memory_bytes) == ("cpu", "cpu", int(20 * GIB * 0.8))
    assert cpu.product == "CPU, 80% of the 20.0 GiB of memory"
    assert [(d.id, d.host) for d in cluster.devices] == [("node7-cpu", "node7")]


@pytest.mark.parametrize("visible", ["", "-1"])
def test_with_all_gpus_hidden_it_is_the_cpu(mixed, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [c.accelerator for c in discover_cluster().classes] == ["cpu"]


def test_a_container_has_less_memory_than_its_host(nvml, monkeypatch, tmp_path):
    nvml.init_error = "LibraryNotFound"
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\n")
    monkeypatch.setattr(module, "_MEMINFO", meminfo)
    monkeypatch.setattr(cgroups, "read_memory_groups", lambda: [MemoryGroup(4 * GIB, 0)])
    (cpu,) = discover_cluster().classes
    assert cpu.memory_bytes == int(4 * GIB * 0.8) and "4.0 GiB" in cpu.product


def test_a_cpu_whose_memory_is_unknown_is_an_error(nvml, monkeypatch, tmp_path):
    nvml.init_error = "LibraryNotFound"
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "none")
    with raises(MachineError, code="cpu-memory-unknown"):
        discover_cluster()


def test_a_driver_that_does_not_start_is_an_error_with_a_fix(nvml):
    nvml.init_error = "Unknown"
    with raises(MachineError, code="nvidia-driver-not-started") as raised:
        discover_cluster()
    assert "nvidia-smi" in raised.value.fix


def test_a_gpu_that_does_not_answer_is_named(mixed):
    mixed.cards[2].lost = True
    with raises(MachineError, code="nvidia-driver-failed", why="GPU is lost") as raised:
        discover_cluster()
    assert raised.value.where == "node7, GPU 2"
    assert mixed.shutdowns == 1


def test_discovery_needs_no_torch(run_python):
    code = "import sys, gpumix.hardware.discovery.discover; print('torch' in sys.modules)"
    assert run_python(code).stdout.strip() == "False"
