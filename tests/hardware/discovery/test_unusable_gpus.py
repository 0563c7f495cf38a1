"""A host whose GPUs torch cannot use is refused with what, why and a fix, never run on its CPU."""

from __future__ import annotations

import pytest

from gpumix.hardware.discovery import discover as discovery
from gpumix.hardware.discovery import unusable_gpus
from gpumix.hardware.discovery.discover import discover_cluster, explain_cpu
from gpumix.schema.errors import MachineError
from helpers.devices.fake_devices import FakeCard, FakeNvml, built_for, plugged_in


@pytest.fixture
def nvml(monkeypatch, tmp_path):
    for name in ("_NVIDIA_MODULE", "_KFD", "_DRI"):
        monkeypatch.setattr(unusable_gpus, name, tmp_path / name)
    return FakeNvml([FakeCard("GPU-1")]).install(monkeypatch)


def refused(**wanted):
    with pytest.raises(MachineError) as raised:
        discover_cluster()
    assert "CUDA_VISIBLE_DEVICES=" in raised.value.fix, "the CPU can be chosen"
    return raised.value


@pytest.mark.parametrize(("toolkit", "version"), [("", ""), ("XPU", "20250301")])
def test_a_build_of_torch_without_cuda(nvml, monkeypatch, toolkit, version):
    built_for(monkeypatch, toolkit, version)
    monkeypatch.setattr(discovery, "find_torch_gpus", lambda host, toolkit: ((), "none"))
    error = refused()
    assert "no CUDA built in" in str(error)
    assert "pip install --force-reinstall torch --index-url" in error.fix and "cu130" in error.fix


def test_a_driver_that_is_too_old_for_torch(nvml):
    nvml.cuda = 12040
    error = refused()
    assert "driver 580.65.06 is for CUDA 12.4 and older" in str(error)
    assert "built for CUDA 13.0" in str(error) and "cu126" in error.fix


def test_a_driver_that_is_too_old_for_any_torch(nvml):
    nvml.cuda = 11040
    error = refused()
    assert error.fix.startswith("install a newer driver; ")
    assert "pip install" not in error.fix


def test_a_driver_that_is_newer_than_torch_runs_it(nvml, monkeypatch):
    built_for(monkeypatch, "CUDA", "12.6")
    assert discover_cluster().classes[0].accelerator == "cuda"


def test_a_card_without_a_driver(nvml, monkeypatch):
    nvml.init_error = "LibraryNotFound"
    plugged_in(monkeypatch, "NVIDIA", "NVIDIA")
    monkeypatch.setattr(discovery, "find_torch_gpus", lambda host, toolkit: ((), "No driver there"))
    error = refused()
    assert "this host has 2 NVIDIA GPUs that torch cannot use" in str(error)
    assert "0000:01:00.0, 0000:02:00.0" in error.where
    assert "no NVIDIA driver is loaded; No driver there" in error.why


def test_a_container_that_was_given_no_card(nvml, monkeypatch, tmp_path):
    nvml.init_error = "LibraryNotFound"
    (tmp_path / "_NVIDIA_MODULE").touch()
    plugged_in(monkeypatch, "NVIDIA")
    monkeypatch.setattr(discovery, "find_torch_gpus", lambda host, toolkit: ((), ""))
    assert "docker run --gpus all" in refused().fix


def test_an_amd_card_and_a_torch_for_cpus(nvml, monkeypatch, tmp_path):
    nvml.init_error = "LibraryNotFound"
    (tmp_path / "_KFD").touch()
    built_for(monkeypatch, "", "")
    plugged_in(monkeypatch, "AMD")
    error = refused()
    assert "this host has 1 AMD GPU that torch cannot use" in str(error)
    assert "built for CPUs only" in error.why and "whl/rocmX.Y" in error.fix


def test_an_amd_card_whose_driver_is_not_loaded(nvml, monkeypatch, tmp_path):
    nvml.init_error = "LibraryNotFound"
    built_for(monkeypatch, "ROCm", "7.1")
    plugged_in(monkeypatch, "AMD")
    monkeypatch.setattr(discovery, "find_torch_gpus", lambda host, toolkit: ((), "No HIP GPUs"))
    error = refused()
    assert f"there is no {tmp_path / '_KFD'}" in error.why and "No HIP GPUs" in error.why


def test_an_intel_card_and_a_torch_for_cuda(nvml, monkeypatch, tmp_path):
    nvml.init_error = "LibraryNotFound"
    (tmp_path / "_DRI").touch()
    plugged_in(monkeypatch, "Intel")
    error = refused()
    assert "1 Intel GPU" in str(error) and error.fix.startswith("pip install")
    assert "whl/xpu" in error.fix


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_who_hides_the_cards_gets_the_cpu(nvml, monkeypatch, variable):
    nvml.init_error = "LibraryNotFound"
    plugged_in(monkeypatch, "NVIDIA", "AMD")
    monkeypatch.setenv(variable, "")
    assert discover_cluster().classes[0].accelerator == "cpu"
    assert explain_cpu() == f"{variable}= hides the GPUs of this host"


def test_a_host_without_a_card_says_so(nvml):
    nvml.init_error = "LibraryNotFound"
    assert discover_cluster().classes[0].accelerator == "cpu"
    assert explain_cpu() == "this host has no GPU"


def test_without_torch_there_is_nothing_to_refuse(nvml, monkeypatch):
    monkeypatch.setattr(discovery, "read_torch_build", lambda: None)
    assert discover_cluster().classes[0].accelerator == "cuda"
