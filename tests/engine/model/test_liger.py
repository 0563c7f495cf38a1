"""Which modules get Liger's kernels, and that they compute what they did. The kernels are made up
here of plain operations, after what their library says of them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpumix.engine.model.kernel_selection import apply_efficiency
from gpumix.schema.cluster.kernels import KernelSettings
from gpumix.schema.errors import MachineError
from helpers.errors import raises
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import SEED, Share, assert_step_is_plain, build, plan_for, prepare

LIGER = KernelSettings(kernels="liger")


class Norm:
    """`LigerRMSNormFunction`: in the way of Llama, casts to fp32 and back before the weight."""

    calls = 0

    @classmethod
    def apply(
        cls, hidden: Tensor, weight: Tensor, eps: float, offset: float, casts: str, in_place: bool
    ) -> Tensor:
        assert casts == "llama" and not in_place  # gradients in the place of what others still need
        cls.calls += 1
        normed = F.rms_norm(hidden.float(), hidden.shape[-1:], eps=eps).to(hidden.dtype)
        return normed * (offset + weight)


class Gate:
    """`LigerSiLUMulFunction`."""

    calls = 0

    @classmethod
    def apply(cls, gate: Tensor, up: Tensor) -> Tensor:
        cls.calls += 1
        return F.silu(gate) * up


@pytest.fixture(autouse=True)
def liger(monkeypatch):
    for name, content in (
        ("liger_kernel", {}),
        ("liger_kernel.ops", {}),
        ("liger_kernel.ops.rms_norm", {"LigerRMSNormFunction": Norm}),
        ("liger_kernel.ops.swiglu", {"LigerSiLUMulFunction": Gate}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    Norm.calls = Gate.calls = 0


def changed(model: nn.Module) -> set[str]:
    """The last parts of the names of modules that compute otherwise."""
    apply_efficiency(model, LIGER, torch.device("cpu"))
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if "forward" in vars(module)
    }


NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {*NORMS, "mlp"}),
        ("mistral", {*NORMS, "mlp"}),
        ("qwen2", {*NORMS, "mlp"}),
        ("qwen3", {*NORMS, "q_norm", "k_norm", "mlp"}),
        ("gemma2", set()),  # its norms add one to their weight, its gates are GELUs
        ("t5", set()),
        ("gpt2", set()),
    ],
)
def test_which_modules_are_changed(name, expected):
    model = ARCHITECTURES[name].factory()
    before = {id(module): type(module).forward for module in model.modules()}
    assert changed(model) == expected
    assert all(before[id(module)] is type(module).forward for module in model.modules())


@pytest.mark.parametrize(("name", "norms", "gates"), [("llama", 13, 6), ("qwen3", 25, 6)])
def test_a_step_is_that_of_plain_pytorch(name, norms, gates):
    """Three blocks of two or four norms and a gate, computed twice, and the norm behind them."""
    architecture = ARCHITECTURES[name]
    model = build(architecture.factory, SEED)
    plan = plan_for(model, [Share(2, 2, 1)])
    (stage,) = plan.stages
    workers = tuple(w.model_copy(update={"efficiency": LIGER}) for w in stage.workers)
    plan = plan.model_copy(update={"stages": (stage.model_copy(update={"workers": workers}),)})
    batch = architecture.batch(2, torch.Generator().manual_seed(1))
    assert_step_is_plain(prepare(model, plan), architecture.factory, batch)
    assert (Norm.calls, Gate.calls) == (norms, gates)


class Gated(nn.Module):
    """As Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Dropped(Gated):
    """As that of T5Gemma: nothing is dropped where agreement is looked at."""

    def forward(self, x: Tensor) -> Tensor:
        product = F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.1, self.training)
        return self.down_proj(product)


class Clamped(Gated):
    """As that of DeepSeek V4: values as large do not come of one sample."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=7.0)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class Gelu(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.GELU()


@pytest.mark.parametrize(
    ("kind", "taken"), [(Gated, True), (Dropped, False), (Clamped, False), (Gelu, False)]
)
def test_layers_that_do_something_else_beside_are_left_alone(kind, taken):
    model = nn.ModuleDict({"layer": kind()})
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    before = model["layer"](x)
    assert changed(model) == ({"layer"} if taken else set())
    torch.manual_seed(0)
    torch.testing.assert_close(model["layer"](x), before)


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rms_norm", SimpleNamespace())
    with raises(MachineError, code="package-missing", fix="pip install liger-kernel"):
        apply_efficiency(Gated(), LIGER, torch.device("cpu"))
