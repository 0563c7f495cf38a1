"""Buffers that a unit's forward updates: once per micro-batch, not again by the recompute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import WIDTH, Regression, vectors
from reference import assert_step_is_plain, engine_alone, initialised


class Normed(nn.Module):
    """A block whose norm keeps running statistics."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = norm

    def forward(self, x):
        return x + self.norm(torch.relu(self.linear(x)).transpose(1, 2)).transpose(1, 2)


class Counter(nn.Module):
    """Scales by how often it ran, as a warm-up inside a model does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        self.runs += 1
        return x + self.inner(self.linear(x)) * self.runs


def batch_norm():
    return Regression([Normed(nn.BatchNorm1d(WIDTH)) for _ in range(2)])


def moving_average():
    return Regression([Normed(nn.BatchNorm1d(WIDTH, momentum=None)) for _ in range(2)])


def instance_norm():
    kind = nn.InstanceNorm1d
    return Regression(
        [Normed(kind(WIDTH, affine=True, track_running_stats=True)) for _ in range(2)]
    )


def counters():
    return Regression([Counter() for _ in range(2)])


@pytest.mark.parametrize("factory", [batch_norm, moving_average, instance_norm, counters])
@pytest.mark.parametrize("micro_batch", [2, 3])
def test_buffers_are_updated_once_per_micro_batch(factory, micro_batch):
    batch = vectors(6, torch.Generator().manual_seed(0))
    engine = engine_alone(factory, 6, micro_batch)
    engine.step(batch)
    plain = initialised(factory)
    for begin in range(0, 6, micro_batch):
        plain(**{k: v[begin : begin + micro_batch] for k, v in batch.items()})
    found = dict(engine.model.named_buffers())
    for name, expected in plain.named_buffers():
        torch.testing.assert_close(found[name], expected, msg=name)


@pytest.mark.parametrize("factory", [batch_norm, moving_average, instance_norm, counters])
def test_gradients_with_running_statistics_are_plain(factory):
    batch = vectors(6, torch.Generator().manual_seed(0))
    assert_step_is_plain(engine_alone(factory, 6, 6), factory, batch)


def test_buffers_of_the_root_are_updated_once_per_micro_batch():
    def factory():
        model = batch_norm()
        model.leave = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(WIDTH, 4))
        return model

    engine = engine_alone(factory, 6, 2)
    engine.step(vectors(6, torch.Generator().manual_seed(0)))
    assert engine.model.leave[0].num_batches_tracked == 3
