"""Buffers that a unit's forward updates: once per micro-batch, not again by the recompute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gpumix.schema.plan.plan import Plan
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import WIDTH, Regression, mean_loss, vectors
from helpers.training.reference import (
    Share,
    assert_step_is_plain,
    engine_alone,
    engine_for,
    initialised,
    own_rows,
)
from helpers.training.staging import EVERY, counters, own_samples, rows, staged_engine, staged_plan


class Normed(nn.Module):
    """A block whose norm keeps running statistics."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = norm

    def forward(self, x):
        return x + self.norm(torch.relu(self.linear(x)).transpose(1, 2)).transpose(1, 2)


def batch_norm():
    return Regression([Normed(nn.BatchNorm1d(WIDTH)) for _ in range(2)])


def moving_average():
    return Regression([Normed(nn.BatchNorm1d(WIDTH, momentum=None)) for _ in range(2)])


def instance_norm():
    kind = nn.InstanceNorm1d
    return Regression(
        [Normed(kind(WIDTH, affine=True, track_running_stats=True)) for _ in range(2)]
    )


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


SAMPLES = 6


def _state_after_a_step(shares):
    engine = engine_for(batch_norm, shares)
    batch = vectors(SAMPLES, torch.Generator().manual_seed(0))
    own = own_rows(batch, shares, engine.comm.rank)
    engine.step(own)
    evaluated = engine.evaluate(own).item()
    return evaluated, {name: value.numpy() for name, value in engine.state_dict().items()}


@pytest.mark.parametrize("idle", left_out([0, 1], [1]))
def test_running_statistics_are_those_of_a_rank_that_trains(idle):
    """The other has none: it saw no samples."""
    shares = [Share(SAMPLES, 3, 1), Share(SAMPLES, 3, 1)]
    shares[idle] = Share(0, 0, 1)
    plain = initialised(batch_norm)
    batch = vectors(SAMPLES, torch.Generator().manual_seed(0))
    for begin in (0, 3):
        plain(**{k: v[begin : begin + 3] for k, v in batch.items()})
    with torch.no_grad():
        loss = mean_loss(plain.eval(), batch).item()
    for evaluated, state in run_ranks(_state_after_a_step, 2, shares):
        assert evaluated == pytest.approx(loss, rel=1e-5)
        for name, expected in plain.named_buffers():
            np.testing.assert_allclose(state[name], expected, rtol=1e-5, err_msg=name)


def test_evaluations_and_checkpoints_of_all_ranks_use_the_same_statistics():
    shares = [Share(2, 2, 1), Share(4, 2, 1)]
    first, second = run_ranks(_state_after_a_step, 2, shares)
    assert first[0] == second[0]
    for name in first[1]:
        np.testing.assert_array_equal(first[1][name], second[1][name])


def test_a_step_that_is_taken_back_leaves_running_statistics_as_they_were():
    engine = engine_alone(batch_norm, SAMPLES, 2)
    batch = vectors(SAMPLES, torch.Generator().manual_seed(0))
    engine.step(batch)
    before = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    batch["x"][0] = torch.nan
    engine.step(batch)
    assert engine.model.blocks[0].norm.running_mean.isnan().any()
    engine.take_back_step()
    assert engine.steps == 1
    for name, buffer in engine.model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def outputs_of_one_process(factory, batch, micro_batch):
    """Of each micro-batch in turn, which finds the buffers as those before have left them."""
    model, size = initialised(factory), len(next(iter(batch.values())))
    with torch.no_grad():
        return [
            mean_loss(
                model, {key: value[begin : begin + micro_batch] for key, value in batch.items()}
            ).item()
            for begin in range(0, size, micro_batch)
        ]


@pytest.mark.parametrize("state", [1, 3])
def test_what_a_step_returns_and_trains_on_is_of_micro_batches_in_order(state):
    """Three of them, and more units than one: any other order scales them otherwise."""
    batch = vectors(6, torch.Generator().manual_seed(0))
    engine = engine_alone(counters, 6, 2, zero_stage=state)
    found = engine.outputs(mean_loss, batch, as_trained=True)
    expected = outputs_of_one_process(counters, batch, 2)
    assert [loss.item() for loss in found.values()] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "waves"), [("gpipe", 2), ("1f1b", 1), ("zero-bubble", 2)])
def test_micro_batches_of_a_wave_keep_their_order(schedule, waves):
    """Each stage has two units and four micro-batches at once."""
    plan = staged_plan("counters", rows([8], [8], micro_batch=1), schedule=schedule, waves=waves)
    found = run_ranks(_loss_of_a_step, 2, plan.model_dump_json())
    expected = outputs_of_one_process(counters, _batch_for_stages(), 1)
    assert found == pytest.approx([sum(expected) / len(expected)] * 2, rel=1e-5)


def _batch_for_stages():
    return EVERY["counters"].batch(8, torch.Generator().manual_seed(0))


def _loss_of_a_step(plan_json):
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("counters", plan)
    return engine.step(own_samples(plan, engine.comm.rank, _batch_for_stages())).item()
