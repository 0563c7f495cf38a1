"""Logits that are not made: whatever a model does to them, results are those of the ordinary ones.

The truth is the same function of `F.linear`'s output.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpumix.engine.cross_entropy import linear_cross_entropy
from gpumix.engine.loss.chunked_cross_entropy import ChunkedCrossEntropy
from gpumix.engine.model.forward_coroutine import ModelError
from helpers.errors import raises

SAMPLES, LENGTH, WIDTH, VOCABULARY = 3, 7, 8, 20
IGNORED = -100


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "compute_chunk_rows", lambda rows, **sizes: 4)


class Head(nn.Module):
    """`function` of the logits and of labels that have the same leading dimensions."""

    def __init__(self, function, *, bias=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
        self.function = function

    def forward(self, hidden, labels):
        return self.function(self.output(hidden), labels)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, VOCABULARY - 1, (SAMPLES, LENGTH), generator=generator)
    labels[1, 2:] = IGNORED
    return hidden.requires_grad_(), labels


def outcome(model):
    """The loss and all gradients."""
    hidden, labels = inputs(model.output.weight.dtype)
    loss = model(hidden, labels)
    loss.backward()
    return [loss, hidden.grad, *(p.grad for p in model.parameters())]


def compared(function, tolerance=1e-6, **settings):
    """The head of `function`, whose results are right."""
    expected = outcome(Head(function, **settings))
    model = Head(function, **settings)
    head = ChunkedCrossEntropy(model)
    with head.step(None):
        found = outcome(model)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return head


def loss(logits, labels, **settings):
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), **settings)


def bias_of_vocabulary():
    return torch.linspace(-1, 1, VOCABULARY)[None, None]


FOLLOWED = {
    "mean": loss,
    "sum": lambda x, y: loss(x, y, reduction="sum"),
    "smoothed": lambda x, y: loss(x, y, label_smoothing=0.1),
    "smoothed sum": lambda x, y: loss(x, y, label_smoothing=0.3, reduction="sum"),
    "other ignored label": lambda x, y: loss(x, y.clamp(min=3), ignore_index=3),
    "all ignored": lambda x, y: loss(x, y.fill_(IGNORED), reduction="sum"),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.view(-1, VOCABULARY), y.flatten()),
    "times": lambda x, y: loss(x * 0.5, y),
    "times a tensor": lambda x, y: loss(torch.tensor(3.0) * x, y),
    "softcap": lambda x, y: loss(2 * torch.tanh(x / 2), y),
    "bias": lambda x, y: loss(x + bias_of_vocabulary(), y),
    "bias in front": lambda x, y: loss(bias_of_vocabulary() - x, y),
    "double": lambda x, y: loss(x.double() * 3, y),
    "half way": lambda x, y: loss((x.float() / 3).to(torch.float32), y),
    "shifted": lambda x, y: loss(x[..., :-1, :].contiguous(), y[..., 1:]),
    "shifted by samples": lambda x, y: loss(x[:, 1:], y[:, :-1]),
    "some rows": lambda x, y: F.cross_entropy(x[y != IGNORED], y[y != IGNORED]),
    "last rows": lambda x, y: F.cross_entropy(x[:, -1], y[:, 0]),
    "reshaped": lambda x, y: F.cross_entropy(x.unsqueeze(0).reshape(-1, x.size(-1)), y.reshape(-1)),
    "asked for its shape": lambda x, y: loss(x, y) * x.shape[0] * x.dim() * len(x),
    "taken twice": lambda x, y: loss(x, y) + loss(x * 2, y, reduction="sum"),
    "not looked at": lambda x, y: (x, loss(x, y))[1],
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name, bias):
    assert compared(FOLLOWED[name], bias=bias).supported


@pytest.mark.parametrize("name", ["mean", "smoothed", "softcap", "bias", "taken twice"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(name, dtype):
    def function(logits, labels):
        return FOLLOWED[name](logits.double() if dtype == torch.float64 else logits.float(), labels)

    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    assert compared(function, tolerance, dtype=dtype).supported


def write_in_place(logits, labels):
    before, view = logits * 2, logits[:, 1:]
    logits[:, 0] = 0
    logits *= 2
    return loss(before, labels) + loss(view, labels[:, 1:]) + loss(logits, labels)


def without_gradient(logits, labels):
    with torch.no_grad():
        shift = logits * 0.5
    return loss(logits - shift, labels)


def soft_labels():
    return torch.linspace(0, 1, VOCABULARY).expand(SAMPLES * LENGTH, VOCABULARY).softmax(-1)


FALLS_BACK = {
    "argmax": lambda x, y: loss(x, y) * (x.argmax(-1) > 9).sum(),
    "softmax": lambda x, y: loss(x.softmax(-1), y),
    "z loss": lambda x, y: loss(x, y) + x.logsumexp(-1).pow(2).mean(),
    "classes first": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "class weights": lambda x, y: loss(x, y, weight=torch.linspace(0, 1, VOCABULARY)),
    "each loss": lambda x, y: loss(x, y, reduction="none").square().sum(),
    "soft labels": lambda x, y: F.cross_entropy(x.flatten(0, 1), soft_labels()),
    "part of the vocabulary": lambda x, y: F.cross_entropy(x[..., :19].flatten(0, 1), y.flatten()),
    "one class": lambda x, y: loss(x, y) + x[..., -1].sum(),
    "mixed": lambda x, y: loss(x.reshape(-1, 2, 10).reshape(-1, 20), y),
    "scaled by row": lambda x, y: loss(x * torch.arange(LENGTH)[:, None], y),
    "added to itself": lambda x, y: loss(x + x.tanh(), y),
    "detached": lambda x, y: loss(x - x.detach() / 2, y),
    "without gradient": without_gradient,
    "written into": write_in_place,
    "written into a view": lambda x, y: (x[0].zero_(), loss(x, y))[1],
}


@pytest.mark.parametrize("name", FALLS_BACK)
def test_falls_back(name):
    head = compared(FALLS_BACK[name])
    assert not head.supported
    assert "the model asks its logits for" in head.full_logits_reason


def test_a_scale_that_is_trained_gets_its_gradient():
    class Scaled(Head):
        def __init__(self, function):
            super().__init__(function)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, hidden, labels):
            return self.function(self.output(hidden) * self.scale, labels)

    model = Scaled(loss)
    with ChunkedCrossEntropy(model).step(None):
        found = outcome(model)
    for one, other in zip(found, outcome(Scaled(loss)), strict=True):
        torch.testing.assert_close(one, other)


def test_without_gradients():
    model = Head(FOLLOWED["softcap"])
    head = ChunkedCrossEntropy(model)
    with torch.no_grad():
        expected = model(*inputs())
        with head.step(None):
            found = model(*inputs())
    torch.testing.assert_close(found, expected)
    assert head.supported
    assert not found.requires_grad


def test_autocast_is_left_alone():
    model = Head(loss)
    head = ChunkedCrossEntropy(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(*inputs())
        with head.step(None):
            assert model(*inputs()) == expected
    assert not head.supported


def test_logits_that_are_asked_for_too_late():
    kept = []
    model = Head(lambda x, y: (kept.append(x), loss(x, y))[1])
    with ChunkedCrossEntropy(model).step(None):
        model(*inputs())
    assert kept[0].shape == (SAMPLES, LENGTH, VOCABULARY)
    with raises(ModelError, code="logits-after-step"):
        kept[0].argmax()


def operand_written_into(logits, labels):
    scale, rows = torch.ones(VOCABULARY), labels != IGNORED
    scaled, some = logits * scale, logits[rows]
    scale.zero_()
    rows.zero_()
    return loss(scaled, labels) + F.cross_entropy(some, labels[labels != IGNORED])


@pytest.mark.parametrize("wanted", ["loss", "argmax"])
@torch.no_grad()  # with gradients PyTorch refuses it
def test_operands_that_are_written_into_later(wanted):
    def function(logits, labels):
        value = operand_written_into(logits, labels)
        return value if wanted == "loss" else value + logits.argmax()

    model = Head(function)
    head = ChunkedCrossEntropy(model)
    expected = model(*inputs())
    with head.step(None):
        torch.testing.assert_close(model(*inputs()), expected)
    assert head.supported == (wanted == "loss")


@pytest.mark.parametrize("use", [loss, lambda x, y: x.sum()])
def test_hidden_states_that_are_written_into_later(use):
    class Writes(Head):
        def forward(self, hidden, labels):
            logits = self.output(hidden)
            hidden.zero_()
            return self.function(logits, labels)

    model = Writes(use)
    refused = raises(ModelError, code="logits-source-overwritten")
    with torch.no_grad(), ChunkedCrossEntropy(model).step(None), refused:
        model(*inputs())


def test_a_model_without_an_output_layer():
    head = ChunkedCrossEntropy(nn.Sequential(nn.Linear(4, 2)))
    assert "no linear output layer" in head.full_logits_reason
