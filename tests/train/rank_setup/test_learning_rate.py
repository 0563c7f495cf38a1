"""The learning rate of every step against closed forms, and which parameters decay."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.engine.sharding.shard import Piece
from gpumix.schema.job.job import DataSpec, Job, LrSchedulerSpec, ModelSpec, OptimizerSpec
from gpumix.train.rank_setup.optimizer import build_optimizer, compute_learning_rate

PEAK = 0.3


def job(steps: int, **schedule) -> Job:
    return Job(
        model=ModelSpec(factory="toys:model"),
        data=DataSpec(factory="toys:tokens"),
        sequence_length=8,
        global_batch_size=8,
        max_steps=steps,
        optimizer=OptimizerSpec(lr=PEAK),
        lr_scheduler=LrSchedulerSpec(**schedule),
    )


def rates(steps: int, **schedule) -> list[float]:
    made = job(steps, **schedule)
    return [compute_learning_rate(made, step) for step in range(steps)]


def test_warm_up_grows_evenly_to_the_peak():
    assert rates(10, warmup_steps=4, type="constant") == pytest.approx(
        [PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK] + [PEAK] * 6
    )


def test_cosine_is_half_way_down_in_the_middle():
    found = rates(101, warmup_steps=1, type="cosine", min_lr_ratio=0.2)
    expected = [PEAK] + [
        PEAK * (0.2 + 0.8 * (1 + math.cos(math.pi * step / 100)) / 2) for step in range(100)
    ]
    assert found == pytest.approx(expected)
    assert found[51] == pytest.approx(PEAK * 0.6)


def test_linear_falls_evenly():
    found = rates(11, warmup_steps=1, type="linear", min_lr_ratio=0.0)
    assert found == pytest.approx([PEAK] + [PEAK * (1 - step / 10) for step in range(10)])


def test_constant_stays():
    assert rates(5, type="constant", min_lr_ratio=0.5) == [PEAK] * 5


def test_a_warm_up_may_be_longer_than_the_run():
    assert rates(3, warmup_steps=6) == pytest.approx([PEAK / 6, PEAK / 3, PEAK / 2])


@given(
    st.integers(1, 50),
    st.integers(0, 60),
    st.sampled_from(["cosine", "linear", "constant"]),
    st.floats(0, 1),
)
def test_every_schedule_rises_to_the_peak_and_never_falls_below_its_end(
    steps, warmup, kind, min_lr_ratio
):
    found = rates(steps, warmup_steps=warmup, type=kind, min_lr_ratio=min_lr_ratio)
    assert found[: warmup + 1] == sorted(found[: warmup + 1])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    assert max(found) <= PEAK * (1 + 1e-12)
    if warmup < steps:
        assert found[warmup] == pytest.approx(PEAK)
        assert found[-1] >= PEAK * min_lr_ratio * (1 - 1e-12)


# -- the optimizer ---------------------------------------------------------------------------------


def piece(name: str, shape: tuple[int, ...], *, numel: int, trained: bool = True) -> Piece:
    """`numel` elements of a parameter of this shape, which is all that a rank has of it."""
    local = nn.Parameter(torch.ones(numel), requires_grad=trained)
    return Piece(name, ParameterSlice(torch.Size(shape)), 0, numel, local)


def test_matrices_decay_whatever_the_shape_of_their_piece():
    pieces = [
        piece("weight", (4, 3), numel=5),
        piece("filters", (2, 2, 2), numel=0),
        piece("bias", (4,), numel=4),
        piece("gain", (), numel=1),
        piece("frozen", (4, 4), numel=16, trained=False),
    ]
    optimizer = build_optimizer(OptimizerSpec(weight_decay=0.05), pieces)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    found = {p.name: decay.get(id(p.local)) for p in pieces}
    assert found == {"weight": 0.05, "filters": 0.05, "bias": 0.0, "gain": 0.0, "frozen": None}


def test_a_step_without_gradient_shrinks_matrices_only():
    pieces = [piece("weight", (2, 2), numel=4), piece("bias", (2,), numel=2)]
    optimizer = build_optimizer(OptimizerSpec(lr=0.1, weight_decay=0.5), pieces)
    for p in pieces:
        p.local.grad = torch.zeros_like(p.local)
    optimizer.step()
    assert pieces[0].local.tolist() == pytest.approx([0.95] * 4)
    assert pieces[1].local.tolist() == [1.0] * 2


def test_sgd_has_its_momentum():
    optimizer = build_optimizer(
        OptimizerSpec(name="sgd", momentum=0.9), [piece("w", (2, 2), numel=4)]
    )
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_a_rank_without_matrices_has_one_group():
    [group] = build_optimizer(OptimizerSpec(), [piece("bias", (2,), numel=2)]).param_groups
    assert group["weight_decay"] == 0.0


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_after_the_last_step_it_stays_at_its_end(kind):
    """As where the doctor tries out more steps than a job has."""
    made = job(10, type=kind, min_lr_ratio=0.1)
    assert [compute_learning_rate(made, step) for step in (10, 15, 100)] == pytest.approx(
        [PEAK / 10] * 3
    )
