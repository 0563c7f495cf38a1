"""The head's loss in chunks: a step is that of plain PyTorch, and whole logits never exist."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpumix.cost.memory_layout.chunk_rows import compute_chunk_bytes
from gpumix.engine.cross_entropy import linear_cross_entropy
from gpumix.engine.cross_entropy.linear_cross_entropy import GradientSum, LinearCrossEntropy
from gpumix.engine.loss.chunked_cross_entropy import ChunkedCrossEntropy
from gpumix.engine.model.deferred_init import build
from gpumix.engine.prepare import prepare
from gpumix.schema.plan.stage import Mode
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.memory import PeakBytes, assert_no_tensor_waits_for_the_collector
from helpers.training.models import ARCHITECTURES, Architecture, causal_lm, causal_model, mean_loss
from helpers.training.reference import (
    SEED,
    Share,
    assert_gradients_equal,
    assert_step_is_plain,
    batches,
    engine_alone,
    initialised,
    joined,
    own_rows,
    pieces_of,
    plain_step,
    plan_for,
)

GPT2 = ARCHITECTURES["gpt2"]
WIDTH = {"intermediate_size": 48, "num_key_value_heads": 2}
SCALED = {
    "cohere": causal_model("CohereConfig", logit_scale=0.3, **WIDTH),
    "granite": causal_model("GraniteConfig", logits_scaling=3.0, **WIDTH),
    "gptj": causal_model("GPTJConfig", n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
}
MODELS = ARCHITECTURES | {n: Architecture(n, f, causal_lm) for n, f in SCALED.items()}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(
        linear_cross_entropy, "compute_chunk_rows", lambda rows, **sizes: min(rows, 10)
    )


@pytest.fixture
def runs(monkeypatch):
    """The losses that were computed, each with whether gradients were made along with it."""
    made: list[bool] = []
    run = LinearCrossEntropy.run

    def noted(self, upstream, into):
        made.append(upstream is not None)
        return run(self, upstream, into)

    monkeypatch.setattr(LinearCrossEntropy, "run", noted)
    return made


def in_chunks(factory, samples, micro_batch, **settings):
    engine = engine_alone(factory, samples, micro_batch, head="chunked", **settings)
    return engine, engine._parts.head


# tied, untied, capped, scaled, masked with a bias, with a bias of the logits, encoder-decoders
@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", "gemma2", "cohere", "granite", "gptj", "bert", "bart", "t5", "mixtral"],
)
def test_a_step_is_plain(name, small_chunks, runs):
    engine, head = in_chunks(MODELS[name].factory, 5, 5)
    batch = next(batches(MODELS[name], 5, 1))
    assert_step_is_plain(engine, MODELS[name].factory, batch)
    assert head.supported, head.full_logits_reason
    assert runs == [True]  # one pass makes loss and gradients


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_evaluation(name, small_chunks, runs):
    engine, head = in_chunks(MODELS[name].factory, 2, 2)
    batch = next(batches(MODELS[name], 5, 1))
    with torch.no_grad():
        expected = mean_loss(initialised(MODELS[name].factory).eval(), batch).item()
    assert engine.evaluate(batch).item() == pytest.approx(expected, rel=1e-5)
    assert head.supported
    assert runs == [False] * 3


def test_a_micro_batch_without_any_label(small_chunks, runs):
    batch = next(batches(GPT2, 4, 1))
    batch["labels"][2:] = -100
    engine, _ = in_chunks(GPT2.factory, 4, 2)
    assert_step_is_plain(engine, GPT2.factory, batch)
    assert runs == [True, True]


def _step():
    shares = [Share(3, 2, 1), Share(2, 1, 0)]
    model = build(GPT2.factory, SEED)
    plan = plan_for(model, shares)
    modes = [Mode(head="chunked"), Mode()]
    workers = [w.model_copy(update={"mode": m}) for w, m in zip(plan.workers, modes)]
    stage = plan.stages[0].model_copy(update={"workers": tuple(workers)})
    engine = prepare(model, plan.model_copy(update={"stages": (stage,)}))
    batch = own_rows(next(batches(GPT2, 5, 1)), shares, engine.comm.rank)
    loss = engine.step(batch).item()
    return loss, pieces_of(engine, gradients=True), engine._parts.head is not None


@pytest.mark.extended
def test_one_rank_in_chunks_and_one_whole():
    loss, expected = plain_step(GPT2.factory, next(batches(GPT2, 5, 1)))
    losses, gradients, chunked = zip(*run_ranks(_step, 2))
    assert losses == pytest.approx([loss] * 2, rel=1e-5)
    assert_gradients_equal(joined(gradients), expected)
    assert chunked == (True, False)


@pytest.mark.parametrize(
    "name, dtype",
    left_out(
        [("gpt2", "bf16"), ("gemma2", "bf16"), ("t5", "bf16"), ("gpt2", "fp16"), ("bert", "fp16")],
        [("gpt2", "bf16"), ("t5", "bf16"), ("bert", "fp16")],
    ),
)
def test_low_precision_is_no_worse_than_with_whole_logits(name, dtype, small_chunks):
    architecture = MODELS[name]
    batch = next(batches(architecture, 6, 1))
    loss, exact = plain_step(architecture.factory, batch)
    errors, losses = {}, {}
    for head in ("whole", "chunked"):
        engine = engine_alone(
            architecture.factory, 6, 3, head=head, compute_dtype=dtype, sequence_length=12
        )
        losses[head] = engine.step(batch).item()
        found = joined([pieces_of(engine, gradients=True)])
        # A rounding of the input moves all gradients; what the loss alone adds would show in these.
        errors[head] = np.sqrt(sum(np.sum((found[n] - exact[n]) ** 2) for n in exact))
    assert losses["chunked"] == pytest.approx(loss, rel=1e-2)
    assert abs(losses["chunked"] - loss) <= abs(losses["whole"] - loss) + 2e-3 * loss
    assert errors["chunked"] < 1.1 * errors["whole"]


# -- models that take more than the loss -----------------------------------------------------------


class Blocks(nn.Module):
    """A model whose forward returns `combine`(logits, labels), a summed loss and a count."""

    def __init__(self, combine):
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.output = nn.Linear(32, 128)
        self.combine = combine

    def forward(self, input_ids, labels, attention_mask):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.combine(self.output(hidden).view(-1, 128), labels.view(-1)), labels.numel()


def summed(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")


def and_not_used(logits, labels):
    return summed(logits, labels) + 0 * summed(logits * 3, labels).detach()


# each loss's combination, and the passes of chunks over it that a step takes
LOSSES = {
    "the sum": (summed, 1),
    "with something added": (lambda x, y: summed(x, y) + 2.5, 1),
    "two of them": (lambda x, y: summed(x, y) + summed(x * 3, y), 2),
    # taken back, and made in backward
    "half of it": (lambda x, y: 0.5 * summed(x, y), 3),
    "squared": (lambda x, y: summed(x, y) ** 2, 3),
    "added to itself": (lambda x, y: (lambda s: s + s)(summed(x, y)), 3),
    "added to a function of it": (lambda x, y: (lambda s: s + s.tanh())(summed(x, y)), 3),
    "one not used": (and_not_used, 3),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_other_models(name, small_chunks, runs):
    combine, passes = LOSSES[name]

    def factory():
        return Blocks(combine)

    engine, head = in_chunks(factory, 4, 4)
    for step in range(2):
        batch = next(batches(GPT2, 4, 1))
        for p in engine.parameters():
            p.grad = None
        plain = initialised(factory)
        loss, count = plain(**batch)
        (loss / count).backward()
        assert engine.step(batch).item() == pytest.approx(loss.item() / count, rel=1e-5)
        expected = {n: p.grad.numpy() for n, p in plain.named_parameters()}
        assert_gradients_equal(joined([pieces_of(engine, gradients=True)]), expected)
        assert head.supported
        if step == 0:
            assert len(runs) == passes


def test_a_loss_function_that_looks_at_logits(small_chunks):
    shares = []

    def loss(model, batch):
        result = model(**batch)
        right = result.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
        shares.append(right.float().mean().item())
        confident = result.logits.logsumexp(-1).square().sum()
        return result.loss * 8 + 0.01 * confident, torch.tensor(8)

    batch = next(batches(GPT2, 4, 1))
    results = {}
    for head in ("whole", "chunked"):
        engine = engine_alone(GPT2.factory, 4, 2, head=head, loss=loss)
        value = engine.step(batch).item()
        results[head] = value, joined([pieces_of(engine, gradients=True)])
    assert results["chunked"][0] == pytest.approx(results["whole"][0], rel=1e-6)
    assert_gradients_equal(results["chunked"][1], results["whole"][1])
    assert shares[2:] == shares[:2]
    assert engine._parts.head.full_logits_reason == "the model asks its logits for 'argmax'"


@pytest.mark.parametrize("trained", ["lm_head", "model"])
def test_parts_of_the_head_that_are_not_trained(trained, small_chunks):
    def factory():
        model = ARCHITECTURES["llama"].factory()
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith(trained))
        return model

    engine, head = in_chunks(factory, 4, 2)
    assert_step_is_plain(engine, factory, next(batches(GPT2, 4, 1)))
    assert head.supported


# tied to the embedding, which adds later; untied; with a bias of the logits
@pytest.mark.parametrize("whole", [False, True], ids=["in chunks", "whole after all"])
@pytest.mark.parametrize("name", left_out(["gpt2", "llama", "bert"], ["bert"]))
def test_what_was_in_the_gradients_memory_does_not_matter(name, whole, small_chunks):
    """The first gradient is written there, by the head or by autograd: nothing is made zero."""
    engine, head = in_chunks(MODELS[name].factory, 5, 2)
    head.full_logits_reason = "as if a model had asked for its logits" if whole else ""
    for group in engine.groups():
        group.gradient.fill_(torch.nan)
    assert_step_is_plain(engine, MODELS[name].factory, next(batches(MODELS[name], 5, 1)))


def test_a_loss_of_no_rows_leaves_gradients_of_zero():
    layer = nn.Linear(4, 6)
    problem = LinearCrossEntropy(
        torch.zeros(0, 4), layer.weight.detach(), layer.bias.detach(), torch.zeros(0, dtype=int),
        operations=(), dtype=torch.float32, ignore_index=-100, label_smoothing=0.0, mean=False,
    )  # fmt: skip
    into = linear_cross_entropy.Gradients(
        torch.empty(0, 4),
        GradientSum(torch.full((6, 4), torch.nan), empty=True),
        GradientSum(torch.full((6,), torch.nan), empty=True),
    )
    problem.run(torch.ones(()), into)
    assert not into.weight.tensor.any() and not into.bias.tensor.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_product_is_written_and_others_are_added(dtype):
    gradient, hidden = torch.randn(9, 40).to(dtype), torch.randn(9, 3).to(dtype)
    products = GradientSum(torch.full((40, 3), torch.nan), empty=True)
    from_zero = GradientSum(torch.zeros(40, 3))
    for _ in range(2):
        products.add_product(gradient, hidden)
        from_zero.add_product(gradient, hidden)
        assert torch.equal(products.tensor, from_zero.tensor)


# -- memory ----------------------------------------------------------------------------------------


def test_whole_logits_never_exist():
    vocabulary, rows = 4096, 64 * 12
    factory = causal_model("LlamaConfig", vocab_size=vocabulary, **WIDTH, num_hidden_layers=1)
    batch = next(batches(GPT2, 64, 1))
    peaks = {}
    for head in ("whole", "chunked"):
        engine = engine_alone(factory, 64, 64, head=head)
        engine.step(batch)
        with PeakBytes() as tracker:
            engine.step(batch)
        peaks[head] = tracker.peak
    logits = rows * vocabulary * 4
    chunk = compute_chunk_bytes(rows, vocabulary=vocabulary, width=32, compute_bytes=4)
    assert peaks["whole"] > 2.5 * logits
    assert peaks["chunked"] < peaks["whole"] - 2.5 * logits + chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_takes_what_is_predicted(dtype):
    rows, vocabulary, width = 700, 4000, 64
    layer = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
    layer.weight.grad_dtype = torch.float32
    layer.weight.grad = torch.zeros(vocabulary, width)
    hidden = torch.randn(rows, width, dtype=dtype)
    problem = LinearCrossEntropy(
        hidden,
        layer.weight.detach(),
        None,
        torch.randint(0, vocabulary, (rows,)),
        operations=(),
        dtype=torch.float32,
        ignore_index=-100,
        label_smoothing=0.0,
        mean=True,
    )
    into = linear_cross_entropy.Gradients(torch.empty_like(hidden), GradientSum(layer.weight.grad))
    with PeakBytes() as tracker, torch.no_grad():
        problem.run(torch.ones(()), into)
    predicted = compute_chunk_bytes(
        rows, vocabulary=vocabulary, width=width, compute_bytes=dtype.itemsize
    )
    others = 2 * hidden.nbytes + layer.weight.nbytes + layer.weight.grad.nbytes
    assert predicted * 0.9 < tracker.peak < predicted + others + rows * 64


@pytest.mark.extended
def test_no_tensor_waits_for_the_garbage_collector():
    engine, head = in_chunks(GPT2.factory, 4, 2)
    batch = next(batches(GPT2, 4, 1))
    assert_no_tensor_waits_for_the_collector(engine, batch)
    assert head.supported


def test_outside_of_a_step_the_model_is_as_it_was():
    model = ARCHITECTURES["gpt2"].factory()
    batch = next(batches(GPT2, 2, 1))
    expected = model(**batch).logits
    ChunkedCrossEntropy(model)
    assert type(model(**batch).logits) is torch.Tensor
    assert torch.equal(model(**batch).logits, expected)
