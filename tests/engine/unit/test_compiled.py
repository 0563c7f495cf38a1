"""Compiled units give what the others give, and are compiled once per kind and mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from gpumix.engine.prepare import prepare
from gpumix.engine.unit.regional_compile import compile_units
from gpumix.schema.errors import MachineError
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.extended import left_out
from helpers.training.models import (
    LENGTH,
    WIDTH,
    Block,
    Regression,
    causal_lm,
    causal_model,
    gpt2,
    packed_lm,
    vectors,
)
from helpers.training.reference import (
    Share,
    assert_gradients_equal,
    engine_alone,
    joined,
    pieces_of,
    plan_for,
)


class Counting:
    """A backend that counts the graphs it is given; they are computed by torch's own kernels."""

    def __init__(self, name: str = "aot_eager") -> None:
        self._backend = lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self._backend(graph, inputs)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def compiled_engine(factory, samples, micro_batch, *, backend=None, **settings):
    engine = engine_alone(factory, samples, micro_batch, **settings)
    backend = backend or Counting()
    sizes = engine.plan.workers[0].micro_batches
    units = engine._parts.units.values()
    compile_units(units, sizes=sizes, device=torch.device("cpu"), backend=backend)
    return engine, backend


def assert_steps_agree(compiled, plain, make_batch, steps=1, tolerance=2e-5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = make_batch(plain.plan.global_batch, generator)
        for engine in (compiled, plain):
            for parameter in engine.parameters():
                parameter.grad = None
        loss, expected = compiled.step(batch).item(), plain.step(batch).item()
        assert loss == pytest.approx(expected, rel=1e-5)
        found = (joined([pieces_of(e, gradients=True)]) for e in (compiled, plain))
        assert_gradients_equal(*found, tolerance)


LLAMA = causal_model("LlamaConfig", num_key_value_heads=2, intermediate_size=48)


SEVERAL_SIZES = [(gpt2(), 5), (LLAMA, 6)]


@pytest.mark.parametrize(
    ("factory", "samples"), left_out(SEVERAL_SIZES, SEVERAL_SIZES[1:]), ids=["gpt2", "llama"]
)
def test_one_graph_for_all_layers_and_sizes(factory, samples):
    """4 + 1 and 4 + 2 samples: torch makes code of its own for 1 by default."""
    compiled, backend = compiled_engine(factory, samples, 4)
    plain = engine_alone(factory, samples, 4)
    assert_steps_agree(compiled, plain, packed_lm, steps=2)
    assert backend.graphs == 1
    batch = packed_lm(samples, torch.Generator().manual_seed(2))
    for _ in range(2):  # of evaluation, without gradients
        assert compiled.evaluate(batch).item() == pytest.approx(plain.evaluate(batch).item())
        assert backend.graphs == 2
    assert_steps_agree(compiled, plain, packed_lm)
    assert backend.graphs == 2


@pytest.mark.extended
@pytest.mark.parametrize(
    ("samples", "micro_batch", "mode"),
    [(8, 3, Mode(recompute=False)), (8, 2, Mode()), (9, 4, Mode())],
)
def test_micro_batches_of_unlike_lengths(samples, micro_batch, mode):
    """All alike in samples, two sizes, and one of one sample: what backward runs again, after other
    lengths came, saves what it saved before."""
    compiled, backend = compiled_engine(gpt2(), samples, micro_batch, mode=mode)
    assert_steps_agree(compiled, engine_alone(gpt2(), samples, micro_batch), causal_lm, steps=3)
    assert backend.graphs <= 4


def blocks(*, dropout=0.0, of=Block):
    return lambda: Regression([of(dropout), of(dropout)])


KEEPING = [Mode(recompute=False), Mode(recompute=False, order="sequential")]


@pytest.mark.extended
@pytest.mark.parametrize("mode", KEEPING, ids=["layered", "sequential"])
def test_graphs_that_are_kept(mode):
    compiled, backend = compiled_engine(blocks(dropout=0.3), 6, 4, mode=mode, zero_stage=0)
    assert_steps_agree(compiled, engine_alone(blocks(dropout=0.3), 6, 4), vectors)
    assert backend.graphs == 1


@pytest.mark.extended
def test_dropout_is_the_same_when_a_unit_is_run_again():
    """And as without compiling, because this backend draws as torch's own kernels do."""
    compiled, _ = compiled_engine(blocks(dropout=0.3), 5, 4)
    assert_steps_agree(compiled, engine_alone(blocks(dropout=0.3), 5, 4), vectors, steps=2)


@pytest.mark.extended
def test_low_precision():
    """Gradients of bf16 weights accumulate in fp32 outside of the graph."""
    factory = blocks(of=Small)
    compiled, backend = compiled_engine(factory, 5, 4, compute_dtype="bf16")
    plain = engine_alone(factory, 5, 4, compute_dtype="bf16")
    assert_steps_agree(compiled, plain, vectors, tolerance=1e-2)
    assert backend.graphs == 1


class Small(nn.Module):
    def __init__(self, dropout=0.3):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout))

    def forward(self, x):
        return x + self.parts(x).tanh()


class Knows(Small):
    """What it computes depends on the number of samples."""

    def forward(self, x):
        return super().forward(x) * (2.0 if x.shape[0] > 3 else 0.5)


class Breaks(Small):
    """Asks for a value in the middle, which no graph can hold; and draws on both sides."""

    def forward(self, x):
        y = super().forward(x)
        return y * 2.0 if y.abs().mean().item() > 1e3 else super().forward(y)


@pytest.mark.extended
@pytest.mark.parametrize("of", [Knows, Breaks])
def test_units_that_are_no_single_graph(of):
    compiled, backend = compiled_engine(blocks(of=of, dropout=0.3), 9, 4)  # 4 + 4 + 1
    plain = engine_alone(blocks(of=of, dropout=0.3), 9, 4)
    assert_steps_agree(compiled, plain, vectors)
    found = backend.graphs
    assert_steps_agree(compiled, plain, vectors, steps=2)
    assert backend.graphs == found


class Mixed(Regression):
    """A first dimension that is not the samples, but as long."""

    def forward(self, x, target):
        x, mask = self.enter(x), torch.zeros(LENGTH, LENGTH)
        for block in self.blocks:
            x = block(x, mask)
        return self.error(x, target)


class Masked(Small):
    def forward(self, x, mask):
        return super().forward(x + mask.sum() + mask[:, :1])


@pytest.mark.extended
def test_as_many_samples_as_tokens():
    def factory():
        return Mixed([Masked(), Masked()])

    compiled, backend = compiled_engine(factory, LENGTH + 1, LENGTH)
    assert_steps_agree(compiled, engine_alone(factory, LENGTH + 1, LENGTH), vectors, steps=2)
    assert backend.graphs <= 3


@pytest.mark.extended
def test_units_that_differ_share_nothing():
    def factory():
        return Regression([Small(0.3), Small(0.1), Small(0.3)])

    compiled, backend = compiled_engine(factory, 3, 2)
    assert_steps_agree(compiled, engine_alone(factory, 3, 2), vectors)
    assert backend.graphs == 2


def test_a_plan_that_compiles_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with raises(MachineError, code="compiler-missing"):
        model = Regression([Block(), Block()])
        plan = plan_for(model, [Share(2, 2, 1)])
        worker = plan.workers[0].model_copy(update={"compile": True})
        stage = plan.stages[0].model_copy(update={"workers": (worker,)})
        prepare(model, plan.model_copy(update={"stages": (stage,)}))


@pytest.mark.extended
@pytest.mark.slow
def test_generated_code():
    """Its dropout is not torch's own, but the same when the unit is run again: as the gradients of
    a graph that was kept tell."""
    compiled, backend = compiled_engine(blocks(), 5, 4, backend=Counting("inductor"))
    assert_steps_agree(compiled, engine_alone(blocks(), 5, 4), vectors, steps=2)
    assert backend.graphs == 1
    factory = blocks(of=Small, dropout=0.3)
    again, _ = compiled_engine(factory, 5, 4, backend="inductor")
    kept, _ = compiled_engine(factory, 5, 4, backend="inductor", mode=KEEPING[0])
    batch = vectors(5, torch.Generator().manual_seed(1))
    again.step(batch)
    kept.step(batch)
    found, expected = (joined([pieces_of(e, gradients=True)]) for e in (again, kept))
    assert_gradients_equal(found, expected)
