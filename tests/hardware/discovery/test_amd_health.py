"""What `amdsmi` says of AMD's GPUs, over a made-up one with the fields of its documentation."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from gpumix.hardware.discovery.amd_health import find_amd_handle, open_amdsmi, read_amd_health
from gpumix.hardware.discovery.gpu_health import GpuHealth

GIB = 2**30


class AmdSmiException(Exception):
    pass


def unsupported(*_: object) -> object:
    raise AmdSmiException("AMDSMI_STATUS_NOT_SUPPORTED")


def fake(**changes) -> SimpleNamespace:
    """Two GPUs, numbered by HIP in the other order."""
    told = {
        "amdsmi_init": lambda: None,
        "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: ["first", "second"],
        "amdsmi_get_gpu_enumeration_info": lambda handle: {
            "first": {"hip_id": 1, "hip_uuid": "GPU-aaaaaaaaaaaaaaaa"},
            "second": {"hip_id": 0, "hip_uuid": "GPU-5f0b0a97ce50b0a9"},
        }[handle],
        "amdsmi_get_gpu_vram_usage": lambda _: {"vram_total": 196592, "vram_used": 20480},
        "amdsmi_get_gpu_total_ecc_count": lambda _: {
            "correctable_count": 4, "uncorrectable_count": 1, "deferred_count": 0,
        },
        "amdsmi_get_gpu_bad_page_info": lambda _: [
            {"value": 1, "page_address": 4096, "page_size": 4096, "status": "RESERVED"}
        ],
        "amdsmi_get_power_cap_info": lambda _: {
            "power_cap": 600_000_000, "default_power_cap": 750_000_000,
        },
        "amdsmi_get_gpu_process_list": lambda _: [
            {"name": "N/A", "pid": 7, "mem": 9, "memory_usage": {"vram_mem": 19 * GIB}},
            {"name": "python", "pid": os.getpid(), "mem": 1, "memory_usage": {"vram_mem": 1}},
            {"name": "N/A", "pid": 8, "mem": "N/A", "memory_usage": {"vram_mem": "N/A"}},
        ],
    }  # fmt: skip
    return SimpleNamespace(AmdSmiException=AmdSmiException, **told | changes)


def test_all_that_the_library_tells():
    assert read_amd_health(fake(), "second", 0) == GpuHealth(
        index=0,
        memory_bytes=196592 * 2**20,
        used_bytes=20 * GIB,
        uncorrected=1,
        pages_pending=False,
        others=((7, 19 * GIB), (8, 0)),
        power_watts=(600.0, 750.0),
    )


def test_a_card_that_tells_only_its_memory():
    silent = {
        name: unsupported
        for name in vars(fake())
        if name.startswith("amdsmi_get_gpu_") and not name.endswith("vram_usage")
    }
    found = read_amd_health(fake(**silent, amdsmi_get_power_cap_info=unsupported), "first", 1)
    assert found == GpuHealth(index=1, memory_bytes=196592 * 2**20, used_bytes=20 * GIB)


@pytest.mark.parametrize(
    ("pages", "pending"),
    [([{"status": "PENDING"}], True), ([], False), ("No bad pages found.", False)],
)
def test_pages_that_wait_for_a_reset(pages, pending):
    found = read_amd_health(fake(amdsmi_get_gpu_bad_page_info=lambda _: pages), "first", 1)
    assert found.pages_pending is pending


def test_a_gpu_is_found_by_torchs_uuid_before_hips_number():
    digits = b"5f0b0a97ce50b0a9".hex()
    uuid = f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    assert find_amd_handle(fake(), uuid, 1) == "second"
    assert find_amd_handle(fake(), "node7-gpu-1", 1) == "first"
    assert find_amd_handle(fake(), "node7-gpu-5", 5) is None


def test_the_driver_is_given_back_and_missing_is_nothing(monkeypatch):
    shut = []
    smi = fake(amdsmi_shut_down=lambda: shut.append(True))
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    with open_amdsmi() as found:
        assert found is smi and not shut
    assert shut == [True]
    monkeypatch.setitem(sys.modules, "amdsmi", fake(amdsmi_init=unsupported))
    with open_amdsmi() as found:
        assert found is None
    monkeypatch.setitem(sys.modules, "amdsmi", None)  # not installed
    with open_amdsmi() as found:
        assert found is None
