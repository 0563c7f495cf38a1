"""Batches and plans that do not fit: told before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpumix.engine.model.deferred_init import build
from gpumix.engine.prepare import prepare
from gpumix.schema.errors import GpumixError, InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, own_blocks, vectors
from helpers.training.reference import SEED, Share, engine_alone, engine_for, plan_for


@pytest.mark.parametrize("samples", [0, 1, 3])
def test_a_batch_of_another_size_than_the_plans(samples):
    engine = engine_alone(own_blocks, 2, 1)
    with raises(InputError, code="samples-not-as-planned", what=(samples, 2)):
        engine.step(vectors(samples, torch.Generator()))


@pytest.mark.parametrize("target", [torch.zeros(3, 12, 4), torch.zeros(())])
def test_tensors_that_differ_in_their_number_of_samples(target):
    engine = engine_alone(own_blocks, 2, 1)
    with raises(InputError, code="batch-dimensions-differ"):
        engine.step({"x": torch.zeros(2, 12, 32), "target": target})


@pytest.mark.parametrize("target", [[1, 2], np.zeros((2, 12, 4)), torch.zeros(2, 12, 4).tolist()])
def test_values_that_are_no_tensors(target):
    """They would go to every micro-batch whole."""
    engine = engine_alone(own_blocks, 2, 1)
    with raises(InputError, code="batch-not-divisible"):
        engine.step({"x": torch.zeros(2, 12, 32), "target": target})


def test_a_plan_for_another_model():
    plan = plan_for(ARCHITECTURES["gpt2"].factory(), [Share(1, 1, 1)])
    with raises(InputError, code="plan-of-another-model"):
        prepare(own_blocks(), plan)


def test_a_plan_with_other_units():
    plan = plan_for(own_blocks(), [Share(1, 1, 1)], units=["Linear"])
    with raises(InputError, code="plan-of-another-model"):
        prepare(own_blocks(), plan)


def test_a_plan_for_more_ranks_than_run():
    plan = plan_for(own_blocks(), [Share(1, 1, 1), Share(1, 1, 1)])
    with raises(InputError, code="plan-rank-count", what=(2, 1)):
        prepare(own_blocks(), plan)


def test_parameters_without_values():
    with torch.device("meta"):
        model = own_blocks()
    with raises(InputError, code="meta-without-values"):
        prepare(model, plan_for(model, [Share(1, 1, 1)]))


def test_buffers_without_values():
    model = own_blocks()
    model.register_buffer("table", torch.zeros(3, device="meta"))
    with raises(InputError, code="meta-without-values", what="table"):
        prepare(model, plan_for(model, [Share(1, 1, 1)]))


def _disagree(rank_shares):
    import torch.distributed as dist

    try:
        engine_for(own_blocks, rank_shares[dist.get_rank()])
    except GpumixError as error:
        return type(error).__name__, str(error)
    return None


def test_ranks_that_disagree_about_the_plan():
    one, other = [Share(2, 1, 1), Share(1, 1, 1)], [Share(1, 1, 1), Share(2, 1, 1)]
    for rank, (kind, message) in enumerate(run_ranks(_disagree, 2, [one, other])):
        assert kind == "InputError"
        assert f"rank {rank} has another one than rank(s) {1 - rank}" in message


def test_ranks_that_agree_go_on():
    shares = [Share(2, 1, 1), Share(1, 1, 1)]
    assert run_ranks(_disagree, 2, [shares, shares]) == [None, None]


def test_a_model_that_is_built_may_be_planned_for_before():
    plan = plan_for(build(own_blocks, SEED), [Share(1, 1, 1)])
    assert prepare(own_blocks(), plan).plan is plan
