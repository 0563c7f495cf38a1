"""The demo takes unlike GPUs that are there, and says what is real where it emulates."""

from __future__ import annotations

import pytest

from gpumix.cli.demo_devices import EMULATED_CLUSTER, choose_demo_devices
from helpers.devices.fake_devices import FakeCard, FakeNvml, built_for

A100 = FakeCard("GPU-2", "NVIDIA A100-SXM4-40GB", 40 * 2**30, (8, 0))


@pytest.fixture
def nvml(monkeypatch):
    return FakeNvml().install(monkeypatch)


def test_unlike_gpus_are_used(nvml):
    nvml.cards = [FakeCard("GPU-1"), A100, FakeCard("GPU-3")]
    found = choose_demo_devices()
    assert (found.cluster, found.emulated) == ("auto", False)
    assert found.said.endswith("nothing is emulated: 2 x rtx-3090 and 1 x a100-sxm4-40gb")
    assert found.model_size["n_embd"] == 768 and found.sequence_length == 512


def test_gpus_of_one_class_show_nothing_unequal(nvml):
    nvml.cards = [FakeCard("GPU-1"), FakeCard("GPU-2")]
    found = choose_demo_devices()
    assert found.cluster is EMULATED_CLUSTER and found.sequence_length == 128
    assert found.said.startswith("2 GPUs of class rtx-3090 on this host, nothing unequal to show")
    assert "speeds and memory are stated" in found.said and "is real" in found.said


@pytest.mark.parametrize("hidden", [False, True])
def test_a_host_without_gpus_says_why(nvml, monkeypatch, hidden):
    nvml.cards = [FakeCard("GPU-1"), A100]
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    else:
        nvml.init_error = "LibraryNotFound"
    found = choose_demo_devices()
    assert found.emulated
    said = "CUDA_VISIBLE_DEVICES= hides the GPUs" if hidden else "this host has no GPU"
    assert found.said.startswith(said)


def test_gpus_that_torch_cannot_use_are_told(nvml, monkeypatch):
    nvml.cards = [FakeCard("GPU-1"), A100]
    built_for(monkeypatch, "", "")
    found = choose_demo_devices()
    assert found.emulated and "no CUDA built in" in found.said and "pip install" in found.said
