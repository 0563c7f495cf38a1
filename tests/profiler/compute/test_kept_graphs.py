"""What a unit takes whose graph is kept instead of being recomputed, and its FLOPs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gpumix.hardware.device import open_device
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.profile.profile import ROOT
from helpers.devices.sweeps import ROWS, costly_model, measure, virtual_time
from helpers.training.models import WIDTH, Regression

CAP = 2**26  # little: a part of it is taken to time the optimizer


class Gated(nn.Module):
    """Saves what two linear layers, an activation and a product need."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x) * torch.nn.functional.silu(self.gate(x)))


def saved_bytes(block: nn.Module, samples: int) -> int:
    """What autograd keeps of a call beside its inputs and parameters, and what it returns."""
    x = torch.randn(samples, ROWS, WIDTH, requires_grad=True)
    known = {t.untyped_storage().data_ptr() for t in (x, *block.parameters())}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(x)
    kept[output.untyped_storage().data_ptr()] = output.untyped_storage().nbytes()
    return sum(kept.values())


def test_bytes_are_those_that_autograd_saves():
    one = DeviceClass(name="one", accelerator="cpu", memory_bytes=CAP)
    with open_device(one, 0) as runtime:
        found = measure(runtime, lambda: Regression([Gated(), Gated()]), largest=4)
    (kind,) = found.model.kinds
    assert kind.saved is not None
    assert kind.saved.values == pytest.approx(
        [saved_bytes(Gated(), n) for n in (1, 2, 4)], rel=0.02
    )
    assert all(a > b for a, b in zip(kind.saved.values, kind.kept.values))


def test_the_backward_of_a_kept_graph_takes_twice_its_forward():
    """That of a linear layer: the gradients of its input and of its weight."""
    with virtual_time():
        one = DeviceClass(name="one", accelerator="cpu", memory_bytes=CAP, emulate_flops_per_s=1e6)
        with open_device(one, 0) as runtime:
            found = measure(runtime, lambda: costly_model(lambda x: None), largest=2)
    (times,) = [t for name, t in found.device_class.units.items() if name != ROOT]
    assert times.gradient is not None
    assert times.gradient.values == pytest.approx([2 * f for f in times.forward.values])
    assert times.inputs is not None and times.weights is not None
    parts = [a + b for a, b in zip(times.inputs.values, times.weights.values)]
    assert parts == pytest.approx(times.gradient.values)


def test_flops_are_of_one_sample_forward():
    with virtual_time():
        one = DeviceClass(name="one", accelerator="cpu", memory_bytes=CAP, emulate_flops_per_s=1e6)
        with open_device(one, 0) as runtime:
            found = measure(runtime, lambda: costly_model(lambda x: None), largest=2)
    (kind,) = found.model.kinds
    assert kind.flops == 2 * ROWS * WIDTH * WIDTH
    assert found.device_class.units[kind.name].forward.values[0] == pytest.approx(kind.flops / 1e6)
    assert found.model.root.flops > 0


def test_a_torch_that_splits_no_backward_is_measured_without(monkeypatch):
    private = "torch.distributed.pipelining._backward"
    monkeypatch.setitem(sys.modules, private, ModuleType(private))
    one = DeviceClass(name="one", accelerator="cpu", memory_bytes=CAP)
    with open_device(one, 0) as runtime:
        found = measure(runtime, lambda: Regression([Gated(), Gated()]), largest=2)
    (kind,) = found.model.kinds
    assert kind.split is None and kind.split_backward is None
    assert kind.saved is not None
    assert all(
        times.inputs is None and times.weights is None
        for times in found.device_class.units.values()
    )
