"""Units that do more than compute: as plain PyTorch does it, or refused, never silently wrong."""

from __future__ import annotations

import copy
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.prepare import prepare
from gpumix.schema.errors import InputError
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.training.models import ARCHITECTURES, WIDTH, Block, Regression, vectors
from helpers.training.reference import Share, assert_step_is_plain, batches, engine_alone, plan_for

BATCH = 4


def one_step(factory, **settings):
    """With two micro-batches, which would see each other's leftovers."""
    generator = torch.Generator().manual_seed(0)
    return engine_alone(factory, BATCH, 2, **settings).step(vectors(BATCH, generator))


def assert_plain(factory, **settings):
    engine = engine_alone(factory, BATCH, BATCH, **settings)
    batch = vectors(BATCH, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine, factory, batch)


# -- what leaves a unit by another way -------------------------------------------------------------


class KeepsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        self.aux = p.mean((0, 1)).pow(2).sum()
        return self.inner(x) * p[..., :1]


class AddsKeptLoss(Regression):
    def forward(self, x, target):
        loss, count = super().forward(x, target)
        return loss + sum(block.aux for block in self.blocks) * count, count


def test_a_loss_that_is_left_on_a_module_is_refused():
    with raises(ModelError, code="unit-tensor-leaked"):
        one_step(lambda: AddsKeptLoss([KeepsLoss(), KeepsLoss()]))


# -- parameters that are not here ------------------------------------------------------------------


class ChecksPoints(Regression):
    """Its own code computes blocks again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__([Block() for _ in range(3)])
        self.reentrant = reentrant

    def forward(self, x, target):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.error(x, target)


@pytest.mark.parametrize("mode", [Mode(), Mode(order="sequential", recompute=False)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_plan_decides_what_is_computed_again(reentrant, mode):
    """And not the model; outside of steps its code does what it says."""
    factory = partial(ChecksPoints, reentrant)
    engine = engine_alone(factory, BATCH, 2, mode=mode, zero_stage=0)
    batch = vectors(BATCH, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine, factory, batch)
    assert engine.model(**batch)[0].isfinite()


class Penalised(Regression):
    def forward(self, x, target):
        loss, count = super().forward(x, target)
        return loss + 0.01 * sum(p.pow(2).sum() for p in self.parameters()), count


def test_a_penalty_on_all_weights_is_refused():
    with raises(ModelError, code="parameter-used-outside-unit"):
        one_step(lambda: Penalised([Block(), Block()]))


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.state_dict(),
        lambda model: torch.save(list(model.parameters()), "saved.pt"),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: model.zero_grad(),
        lambda model: copy.deepcopy(model.blocks),
    ],
    ids=["state_dict", "save", "clip", "zero_grad", "copy"],
)
def test_parameters_between_steps_are_ordinary_ones(use, tmp_path, monkeypatch):
    """Of a rank that has all of them."""
    monkeypatch.chdir(tmp_path)
    engine = engine_alone(lambda: Regression([Block(), Block()]), BATCH, 2)
    batch = vectors(BATCH, torch.Generator().manual_seed(0))
    engine.step(batch)
    use(engine.model)
    engine.step(batch)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused(hook):
    def factory():
        model = Regression([Block(), Block()])
        getattr(model.leave.weight, hook)(lambda _: None)
        return model

    with raises(InputError, code="parameter-gradient-hook", what="leave.weight"):
        prepare(factory(), plan_for(factory(), [Share(2, 1, 1)]))


class CountsCalls(Block):
    """Its state dict has a number that is in no tensor."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_a_state_dict_has_what_modules_say_beside():
    engine = engine_alone(lambda: Regression([CountsCalls(), CountsCalls()]), BATCH, 2)
    state = engine.state_dict()
    assert state.keys() == Regression([CountsCalls(), CountsCalls()]).state_dict().keys()
    state["blocks.1._extra_state"] = {"calls": 7}
    engine.load_state_dict(state)
    assert engine.model.blocks[1].calls == 7


def test_a_model_that_was_cast_between_steps_is_refused():
    """What the optimizer updates would be another one's."""
    engine = engine_alone(lambda: Regression([Block(), Block()]), BATCH, 2)
    batch = vectors(BATCH, torch.Generator().manual_seed(0))
    engine.step(batch)
    engine.model.to(torch.bfloat16)
    with raises(InputError, code="parameter-replaced"):
        engine.step(batch)


def test_what_a_parameter_looks_like_may_be_asked_at_any_time():
    model = engine_alone(lambda: Regression([Block(), Block()]), BATCH, 2).model
    plain = Regression([Block(), Block()])
    for name, parameter in model.named_parameters():
        other = dict(plain.named_parameters())[name]
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.shape, parameter.dtype, parameter.device, parameter.requires_grad) == (
            other.shape, other.dtype, other.device, other.requires_grad,
        )  # fmt: skip
        assert parameter.numel() == other.numel()
    assert "Linear" in repr(model)


class HoldsInList(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.weights = [self.weight]

    def forward(self, x):
        return self.inner(x @ self.weights[0])


def test_a_parameter_that_is_held_twice_is_refused():
    with raises(InputError, code="parameter-held-twice", what="blocks.0.weight"):
        one_step(lambda: Regression([HoldsInList(), HoldsInList()]))


def test_a_compiled_unit_is_refused():
    def factory():
        model = Regression([Block(), Block()])
        model.blocks[1].compile(backend="eager")
        return model

    with raises(InputError, code="module-compiled-whole", what="blocks.1"):
        one_step(factory)


# -- hooks -----------------------------------------------------------------------------------------


class HookOnOutput(Regression):
    def forward(self, x, target):
        x = self.blocks[0](self.enter(x))
        x.register_hook(lambda gradient: gradient * 0.5)
        return self.error(self.blocks[1](x), target)


class HookOnInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return self.inner(x)


def test_a_hook_on_a_units_output_runs():
    assert_plain(lambda: HookOnOutput([Block(), Block()]))


def test_a_hook_on_a_units_input_runs_once():
    assert_plain(lambda: Regression([HookOnInput(), HookOnInput()]), units=["HookOnInput"])


# -- a unit that differentiates by itself ----------------------------------------------------------


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = (self.linear(x) ** 3).sum()
        [slope] = torch.autograd.grad(y, x, create_graph=True)
        return x + (slope * self.calls.clone()).sin()


def test_gradients_inside_of_a_unit():
    assert_plain(lambda: Regression([Slope(), Slope()]), units=["Slope"])


# -- process-wide switches -------------------------------------------------------------------------


def test_kernels_chosen_around_the_model_hold_for_the_recompute_and_not_longer():
    def loss(model, batch):
        with sdpa_kernel(SDPBackend.MATH):
            result = model(**batch)
        count = (batch["labels"][..., 1:] != -100).sum()
        return result.loss * count, count

    architecture = ARCHITECTURES["mistral"]
    batch = next(batches(architecture, BATCH, 1))
    before = torch.backends.cuda.flash_sdp_enabled()
    found = engine_alone(architecture.factory, BATCH, 2, loss=loss).step(batch)
    plain = engine_alone(architecture.factory, BATCH, 2).step(batch)
    assert found.item() == pytest.approx(plain.item(), rel=1e-5)
    assert torch.backends.cuda.flash_sdp_enabled() == before


def test_a_device_context_inside_of_the_loss_is_refused():
    def loss(model, batch):
        with torch.device("cpu"):
            return model(**batch)

    with raises(ModelError, code="unit-in-function-mode"):
        one_step(lambda: Regression([Block(), Block()]), loss=loss)


# -- memory ----------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Returns what nobody uses, as blocks of BLOOM return their attention."""

    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        y = self.inner(x)
        return y, y.repeat(64, 1, 1)


def test_outputs_that_the_model_drops_take_no_memory():
    alive = []

    class Watches(Regression):
        def forward(self, x, target):
            x, wide = self.blocks[0](self.enter(x))
            alive.append(weakref.ref(wide.untyped_storage()))
            del wide
            x, _ = self.blocks[1](x)
            assert all(storage() is None for storage in alive)
            return self.error(x, target)

    one_step(lambda: Watches([Wide(), Wide()]), units=["Wide"])
    assert len(alive) == 2
