"""Which GPUs are plugged in, from folders as Linux has them under `/sys/bus/pci/devices`."""

from __future__ import annotations

import pytest

from gpumix.hardware.discovery import pci_gpus as module
from gpumix.hardware.discovery.pci_gpus import PciGpu, describe_gpus, list_pci_gpus


@pytest.fixture
def bus(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_BUS", tmp_path / "devices")

    def plug(address, vendor, kind, *, vram=None, driver=""):
        folder = tmp_path / "devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
        if vram is not None:
            (folder / "mem_info_vram_total").write_text(f"{vram}\n")
        if driver:
            (tmp_path / driver).mkdir(exist_ok=True)
            (folder / "driver").symlink_to(tmp_path / driver)

    return plug


def test_cards_that_compute(bus):
    bus("0000:65:00.0", "0x10de", "0x030200")  # an H100 is a "3D controller"
    bus("0000:01:00.0", "0x10de", "0x030000", driver="nvidia")
    bus("0000:83:00.0", "0x1002", "0x120000")  # an MI300X is a "processing accelerator"
    bus("0000:84:00.0", "0x1002", "0x030000", vram=24 * 2**30)
    bus("0000:b5:00.0", "0x8086", "0x038000")
    found = list_pci_gpus()
    makers = [(card.address[5:7], card.maker) for card in found]
    assert makers == [
        ("01", "NVIDIA"), ("65", "NVIDIA"), ("83", "AMD"), ("84", "AMD"), ("b5", "Intel"),
    ]  # fmt: skip
    assert describe_gpus(found) == "2 NVIDIA GPUs and 2 AMD GPUs and 1 Intel GPU"


def test_no_card_for_computing(bus):
    bus("0000:00:02.0", "0x8086", "0x030000")  # inside of the CPU
    bus("0000:05:00.0", "0x1002", "0x030000", vram=512 * 2**20)  # also
    bus("0000:06:00.0", "0x1002", "0x030000")  # no driver is loaded: not known to be more
    bus("0000:01:00.1", "0x10de", "0x040300")  # the sound of a card
    bus("0000:07:00.0", "0x1a03", "0x030000")  # a server's console
    bus("0000:08:00.0", "0x10de", "0x030200", driver="vfio-pci")  # a virtual machine's
    assert list_pci_gpus() == ()


def test_a_system_without_a_bus(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_BUS", tmp_path / "none")
    assert list_pci_gpus() == ()


def test_a_card_that_vanishes_meanwhile(bus, tmp_path):
    bus("0000:65:00.0", "0x10de", "0x030200")
    (tmp_path / "devices" / "0000:66:00.0").mkdir()
    assert list_pci_gpus() == (PciGpu("NVIDIA", "0000:65:00.0"),)
