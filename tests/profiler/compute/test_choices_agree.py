"""What was chosen for a device is used where it computes what plain fp32 does, and only there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from gpumix.engine.unit.regional_compile import CompiledForward
from gpumix.hardware.device import open_device
from gpumix.hardware.estimates.kernel_choice import PLAIN_SETTINGS, ChosenSettings
from gpumix.profiler.class_settings import ClassSettings
from gpumix.profiler.compute import numerics_check, unit_runner
from gpumix.profiler.compute.class_measurement import measure_class
from gpumix.profiler.subject import Workload
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.cluster.kernels import KernelSettings, SettingChoice
from gpumix.schema.profile.profile import ClassProfile
from helpers.devices.sweeps import subject
from helpers.extended import every_second
from helpers.training.models import ARCHITECTURES, WIDTH, Regression

MIB = 2**20
NAMES = ("dtype", "compile", "attention", "channels_last", "fused_optimizer")


def wanted(**settings) -> ChosenSettings:
    choices = tuple(SettingChoice(what=name, value="?", why="as asked") for name in NAMES)
    return ChosenSettings(KernelSettings(**settings), choices)


def measured(what: Workload) -> tuple[ClassProfile, list[str]]:
    told: list[str] = []
    one = DeviceClass(name="one", accelerator="cpu", memory_bytes=64 * MIB)
    with open_device(one, 0) as runtime:
        found = measure_class(what, runtime, device_class="one", progress=told.append)
    return found.device_class, [line for line in told if "not used" in line]


def compared(what: Workload) -> tuple[Workload, list[str]]:
    """What is left of the choices; no time is measured."""
    told: list[str] = []
    one = DeviceClass(name="one", accelerator="cpu", memory_bytes=64 * MIB)
    with open_device(one, 0) as runtime:
        found = numerics_check.keep_agreeing_settings(what, runtime, "one", told.append)
    return found, [line for line in told if "not used" in line]


def of_one(
    dtype: str = "fp32", chosen: ChosenSettings = PLAIN_SETTINGS, *, compiled: bool = False
) -> ClassSettings:
    return ClassSettings({"one": dtype}, frozenset(["one"] if compiled else []), {"one": chosen})


def llama(*, dtype: str = "fp32", chosen: ChosenSettings = PLAIN_SETTINGS) -> Workload:
    architecture = ARCHITECTURES["llama"]
    # Another batch at each call, as a program's own may be.
    generator = torch.Generator().manual_seed(1)
    made = subject(
        architecture.factory, largest=1, make_batch=lambda n: architecture.batch(n, generator)
    )
    return replace(made, settings=of_one(dtype, chosen))


@pytest.mark.parametrize("dtype", every_second(["bf16", "fp32"]))
def test_what_computes_the_same_is_used(dtype):
    settings = {"attention": "eager", "channels_last": True}
    found, told = compared(llama(dtype=dtype, chosen=wanted(**settings)))
    assert not told
    chosen = found.settings.chosen["one"]
    assert chosen.efficiency == KernelSettings(**settings)
    assert found.settings.dtypes["one"] == dtype
    assert "off fp32" in chosen.why("attention")
    assert ("off fp32" in chosen.why("dtype")) == (dtype == "bf16")


class OtherGradient(torch.autograd.Function):
    """Nothing, but for the gradient."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return 1.5 * gradient


class Patches(nn.Module):
    """Of images, by a convolution that belongs to no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, images, labels):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return (x.mean(1).sum(-1) - labels).square().sum(), len(labels)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)  # as an expert that no token goes to

    def forward(self, x):
        return x + self.linear(x)


@pytest.mark.parametrize("is_right", every_second([False, True]))
def test_what_comes_before_the_first_unit_is_compared_too(monkeypatch, is_right):
    """A kernel for channels last that is wrong in the gradients of the weights alone."""

    def make_batch(samples: int):
        return {"images": torch.randn(samples, 3, 16, 16), "labels": torch.randn(samples)}

    made = subject(Patches, largest=1, make_batch=make_batch)
    convolve = nn.Conv2d._conv_forward
    met = []

    def with_other_gradients(self, images, weight, bias):
        if images.is_contiguous(memory_format=torch.channels_last):
            met.append(images.shape)
            weight = weight if is_right else OtherGradient.apply(weight)
        return convolve(self, images, weight, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", with_other_gradients)
    images = replace(made, settings=of_one(chosen=wanted(channels_last=True)))
    found, told = measured(images)
    assert met
    assert found.efficiency.channels_last is is_right
    assert told == [] if is_right else "50.0% off fp32" in told[0]


def test_attention_that_computes_something_else_is_not_used(monkeypatch):
    plain = numerics_check.apply_efficiency

    def wrong(model, efficiency, device):
        plain(model, efficiency, device)
        if efficiency.attention == "eager":
            for module in model.modules():
                if type(module).__name__ == "LlamaAttention":
                    module.register_forward_hook(lambda m, a, out: (out[0] * 1.1, *out[1:]))

    monkeypatch.setattr(numerics_check, "apply_efficiency", wrong)
    found, [told] = compared(llama(chosen=wanted(attention="eager")))
    chosen = found.settings.chosen["one"]
    assert chosen.efficiency.attention == "own"
    assert "attention is not used: a unit is" in told
    assert chosen.why("attention").startswith("not used")


class BrokenInBf16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * (1.0 if x.dtype == torch.float32 else float("nan"))


def test_a_dtype_that_computes_something_else_is_not_used():
    what = subject(lambda: Regression([BrokenInBf16() for _ in range(2)]), largest=1)
    found, [told] = measured(replace(what, settings=of_one("bf16")))
    assert found.compute_dtype == "fp32"
    assert "dtype is not used" in told


def test_what_there_is_no_room_to_check_is_not_used_but_for_the_dtype(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(numerics_check, "compute_results", full)
    found, [told] = compared(llama(dtype="bf16", chosen=wanted(attention="eager")))
    assert found.settings.dtypes["one"] == "bf16"
    assert found.settings.chosen["one"].efficiency.attention == "own"
    assert "no room to check it" in told


def test_a_model_without_a_choice_of_attention_keeps_its_own():
    what = subject(lambda: Regression([BrokenInBf16() for _ in range(2)]), largest=1)
    found, [told] = measured(replace(what, settings=of_one(chosen=wanted(attention="sdpa"))))
    assert found.efficiency.attention == "own"
    assert "no choice of attention" in told


class _Compiled(CompiledForward):
    """As compiled code would be, off by a factor."""

    def __init__(self, plain, factor: float) -> None:
        self.plain, self.factor = plain, factor

    def __call__(self, *args, **kwargs):
        return self.plain(*args, **kwargs) * self.factor


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_compiled_code_that_computes_something_else_is_not_used(monkeypatch, factor):
    def compiled(units, **_):
        for unit in units:
            unit.forward = _Compiled(unit.forward, factor)

    monkeypatch.setattr(unit_runner, "compile_units", compiled)
    what = subject(lambda: Regression([BrokenInBf16() for _ in range(2)]), largest=1)
    what = replace(what, settings=of_one(chosen=wanted(), compiled=True))
    found, told = measured(what)
    assert found.compiled == (factor == 1.0)
    assert len(told) == (factor != 1.0)


def test_compiled_units_that_draw_are_not_said_to_agree(monkeypatch):
    """Two runs without compiled code differ as much."""

    def compiled(units, **_):
        for unit in units:
            unit.forward = _Compiled(unit.forward, 1.0)

    class Dropping(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    monkeypatch.setattr(unit_runner, "compile_units", compiled)
    what = subject(lambda: Regression([Dropping() for _ in range(2)]), largest=1)
    what = replace(what, settings=of_one(chosen=wanted(), compiled=True))
    found, told = measured(what)
    assert found.compiled and not told
    [why] = [choice.why for choice in found.choices if choice.what == "compile"]
    assert "not compared" in why and "dropout" in why and "are 0 off" not in why


@pytest.mark.extended
def test_compiled_units_are_measured_in_all_ways(monkeypatch):
    """Also with their backward in two parts, for which the graph runs twice."""
    compiled = partial(unit_runner.compile_units, backend="aot_eager")
    monkeypatch.setattr(unit_runner, "compile_units", compiled)
    found, told = measured(replace(llama(), settings=of_one(chosen=wanted(), compiled=True)))
    assert found.compiled
    assert not told
    [why] = [choice.why for choice in found.choices if choice.what == "compile"]
    assert "off the same units without" in why


def test_a_fused_optimizer_that_updates_otherwise_is_not_used():
    class Wrong(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                if group["fused"]:
                    with torch.no_grad():
                        torch._foreach_mul_(group["params"], 1.01)

    def of(made: type[torch.optim.AdamW]) -> bool:
        # As a job has it: a group's own settings, beside the defaults.
        what = replace(
            llama(chosen=wanted()),
            optimizer_of=lambda p: made([{"params": p, "weight_decay": 0.1}], fused=True),
        )
        return measured(what)[0].efficiency.fused_optimizer

    assert of(torch.optim.AdamW)
    assert not of(Wrong)


def test_tf32_is_switched_on_for_gpus_alone():
    before = torch.get_float32_matmul_precision()
    numerics_check.apply_efficiency(nn.Linear(1, 1), KernelSettings(tf32=True), torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("compared", "loss", "why"),
    [
        ((1e-6, 1.5), "triton", "1.50 times torch's speed here, 1e-06 off it"),
        ((0.2, 1.5), "torch", "not used: 20.0% off torch's way"),
        ((float("nan"), 1.5), "torch", "not used: nan% off torch's way"),
        ((1e-6, 0.8), "torch", "not used: 0.80 times torch's speed here"),
        (RuntimeError("no such target\nmore of it"), "torch", "not used: no such target"),
    ],
)
def test_a_fused_loss_is_used_where_it_computes_the_same_faster(monkeypatch, compared, loss, why):
    """The kernel itself needs a GPU; what it came to beside torch's way is stood in for."""
    asked = []

    def compare(width, classes, *_):
        asked.append((width, classes))
        if isinstance(compared, Exception):
            raise compared
        return compared

    monkeypatch.setattr(numerics_check, "compare_losses", compare)
    what = llama()
    head = what.build().lm_head
    chosen = replace(
        wanted(loss="triton"), choices=(SettingChoice(what="loss", value="?", why="asked"),)
    )
    one = DeviceClass(name="one", accelerator="cpu", memory_bytes=64 * MIB)
    with open_device(one, 0) as runtime:
        what = replace(what, settings=of_one(chosen=chosen))
        agreeing = numerics_check.keep_agreeing_settings(what, runtime, "one", print)
    found = agreeing.settings.chosen["one"]
    assert asked == [(head.in_features, head.out_features)]
    assert found.efficiency.loss == loss
    assert found.why("loss") == why
