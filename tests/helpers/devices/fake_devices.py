"""What several tests of the hardware need: an emulated class, a fake NVML."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

from gpumix.hardware.discovery import discover
from gpumix.hardware.discovery.pci_gpus import PciGpu
from gpumix.hardware.discovery.torch_build import TorchBuild
from gpumix.schema.cluster.cluster import DeviceClass


def emulated_class(**changes) -> DeviceClass:
    values = {"name": "small", "accelerator": "cpu", "memory_bytes": 2**20}
    return DeviceClass(**{**values, "emulate_flops_per_s": 1e12, **changes})


@dataclass
class FakeCard:
    uuid: str
    product: str = "NVIDIA GeForce RTX 3090"
    memory: int = 24 * 2**30
    capability: tuple[int, int] = (8, 6)
    mig: bool | None = None  # None: a product that cannot be cut
    lost: bool = False


@dataclass
class FakeNvml:
    """The part of pynvml that discovery uses, over a list of cards."""

    cards: list[FakeCard] = field(default_factory=list)
    init_error: str = ""
    shutdowns: int = 0
    cuda: int = 13000  # the newest that the driver knows

    def module(self) -> ModuleType:
        nvml = ModuleType("pynvml")
        nvml.NVMLError = type("NVMLError", (Exception,), {})
        for name in ("LibraryNotFound", "DriverNotLoaded", "NotSupported", "GpuIsLost", "Unknown"):
            setattr(nvml, f"NVMLError_{name}", type(name, (nvml.NVMLError,), {}))
        nvml.NVML_DEVICE_MIG_ENABLE = 1

        def init():
            if self.init_error:
                raise getattr(nvml, f"NVMLError_{self.init_error}")(self.init_error)

        def handle(index):
            if self.cards[index].lost:
                raise nvml.NVMLError_GpuIsLost("GPU is lost")
            return self.cards[index]

        def mig_mode(card):
            if card.mig is None:
                raise nvml.NVMLError_NotSupported("Not Supported")
            return [int(card.mig), int(card.mig)]

        def shutdown():
            self.shutdowns += 1

        nvml.nvmlInit = init
        nvml.nvmlShutdown = shutdown
        nvml.nvmlSystemGetDriverVersion = lambda: "580.65.06"
        nvml.nvmlSystemGetCudaDriverVersion_v2 = lambda: self.cuda
        nvml.nvmlDeviceGetCount = lambda: len(self.cards)
        nvml.nvmlDeviceGetHandleByIndex = handle
        nvml.nvmlDeviceGetName = lambda card: card.product.encode()
        nvml.nvmlDeviceGetUUID = lambda card: card.uuid
        nvml.nvmlDeviceGetMemoryInfo = lambda card: SimpleNamespace(total=card.memory)
        nvml.nvmlDeviceGetCudaComputeCapability = lambda card: card.capability
        nvml.nvmlDeviceGetMigMode = mig_mode
        return nvml

    def install(self, monkeypatch) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", self.module())
        for name in CHOICES:
            monkeypatch.delenv(name, raising=False)
        built_for(monkeypatch, "CUDA", "13.0")
        plugged_in(monkeypatch)
        monkeypatch.setattr(discover, "has_gpu_signs", lambda: False)
        return self


CHOICES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


def built_for(monkeypatch, toolkit: str, version: str) -> TorchBuild:
    """What discovery takes the installed torch for."""
    build = TorchBuild(f"2.13.0+{toolkit.lower() or 'cpu'}", toolkit, version)
    monkeypatch.setattr(discover, "read_torch_build", lambda: build)
    return build


def plugged_in(monkeypatch, *makers: str) -> None:
    """What is on the bus of this host."""
    cards = tuple(PciGpu(maker, f"0000:{n + 1:02}:00.0") for n, maker in enumerate(makers))
    monkeypatch.setattr(discover, "list_pci_gpus", lambda: cards)
