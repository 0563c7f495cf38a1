"""GPUs on the PCI bus, whether or not a driver or torch can use them.

Read from Linux's `/sys`, also in containers. Only compute GPUs count: GPUs integrated in a CPU
(Intel's at bus 0, AMD's with little own memory) and GPUs passed to a virtual machine (`vfio-pci`)
are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpumix.schema.files import read_log

Maker = Literal["NVIDIA", "AMD", "Intel"]

_BUS = Path("/sys/bus/pci/devices")
_MAKERS: dict[str, Maker] = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_DISPLAY_CLASS = "0x0300"  # PCI class of GPUs that can drive a screen
_COMPUTE_CLASSES = {"0x0302", "0x0380", "0x1200"}  # 3D, other display, processing accelerator
_LEAST_OWN_BYTES = 4 * 2**30  # AMD GPUs inside CPUs have less


@dataclass(frozen=True)
class PciGpu:
    """A GPU on the bus, at an address such as "0000:65:00.0"."""

    maker: Maker
    address: str


def list_pci_gpus() -> tuple[PciGpu, ...]:
    """Return the GPUs by address; empty without GPUs, and on systems without `/sys`."""
    folders = sorted(_BUS.iterdir()) if _BUS.is_dir() else []
    found = (_read_pci_gpu(folder) for folder in folders)
    return tuple(card for card in found if card is not None)


def describe_gpus(cards: tuple[PciGpu, ...]) -> str:
    """Count GPUs in words, such as "2 NVIDIA GPUs and 1 AMD GPU"."""
    numbers = Counter(card.maker for card in cards)
    told = [f"{n} {maker} GPU{'s' if n > 1 else ''}" for maker, n in numbers.items()]
    return " and ".join(told)


def _read_pci_gpu(folder: Path) -> PciGpu | None:
    maker = _MAKERS.get(_read_text(folder / "vendor"))
    kind = _read_text(folder / "class")[:6]
    if maker is None or (kind != _DISPLAY_CLASS and kind not in _COMPUTE_CLASSES):
        return None
    driver = folder / "driver"
    if driver.exists() and driver.resolve().name == "vfio-pci":
        return None
    inside_cpu = {
        "NVIDIA": False,
        "Intel": folder.name.split(":")[1:2] == ["00"],
        "AMD": kind == _DISPLAY_CLASS
        and int(_read_text(folder / "mem_info_vram_total") or 0) < _LEAST_OWN_BYTES,
    }[maker]
    return None if inside_cpu else PciGpu(maker, folder.name)


def _read_text(file: Path) -> str:
    try:
        return read_log(file).strip()
    except OSError:
        return ""
