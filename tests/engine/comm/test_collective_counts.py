"""How many collectives a step takes: it depends on the units alone."""

from __future__ import annotations

import pytest

from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, partly_frozen_gpt2
from helpers.training.reference import Share, batches, engine_alone, engine_for, own_rows

GPT2 = ARCHITECTURES["gpt2"]


def counts_of(engine, action):
    before = engine.comm.counts.copy()
    action()
    return dict(engine.comm.counts - before)


def step_counts(samples: int, micro_batch: int) -> dict[str, int]:
    engine = engine_alone(GPT2.factory, samples, micro_batch)
    batch = next(batches(GPT2, samples, 1))
    return counts_of(engine, lambda: engine.step(batch))


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 6])
def test_a_step_gathers_units_twice_but_the_last_and_the_root_once(micro_batch):
    assert step_counts(6, micro_batch) == {"gather": 2 * 3 - 1 + 1, "reduce": 3 + 1, "exchange": 1}


def test_an_evaluation_gathers_once_and_reduces_nothing():
    engine = engine_alone(GPT2.factory, 4, 2)
    batch = next(batches(GPT2, 4, 1))
    # The first one asks whether any rank calls a unit again.
    assert counts_of(engine, lambda: engine.evaluate(batch)) == {"gather": 4, "exchange": 2}
    assert counts_of(engine, lambda: engine.evaluate(batch)) == {"gather": 4, "exchange": 1}


def test_clipping_takes_one_all_reduce():
    engine = engine_alone(GPT2.factory, 2, 2)
    engine.step(next(batches(GPT2, 2, 1)))
    assert counts_of(engine, lambda: engine.clip_grad_norm_(1.0)) == {"all_reduce": 1}


def test_bytes_are_those_of_the_gathered_buffers():
    engine = engine_alone(GPT2.factory, 2, 1)
    sizes = {g.label: 4 * g.numel for g in engine.groups()}
    before = engine.comm.bytes.copy()
    engine.step(next(batches(GPT2, 2, 1)))
    moved = engine.comm.bytes - before
    assert moved["reduce"] == sum(sizes.values())
    once = sizes["(root)"] + sizes["transformer.h.2"]
    assert moved["gather"] == 2 * sum(sizes.values()) - once


def _count_on_ranks(shares):
    engine = engine_for(GPT2.factory, shares)
    batch = next(batches(GPT2, sum(s.samples for s in shares), 1))
    mine = own_rows(batch, shares, engine.comm.rank)
    return counts_of(engine, lambda: engine.step(mine))


def test_ranks_with_other_micro_batches_take_the_same_collectives():
    shares = [Share(5, 1, 1), Share(0, 0, 2), Share(4, 4, 0)]
    counts = run_ranks(_count_on_ranks, 3, shares)
    assert counts == [{"gather": 6, "reduce": 4, "exchange": 1, "flags": 1}] * 3


def test_frozen_parameters_are_gathered_but_not_reduced():
    engine = engine_alone(partly_frozen_gpt2, 2, 1)
    batch = next(batches(GPT2, 2, 1))
    # unit 0 has one frozen group, unit 1 a frozen and a trained one, unit 2 and root a trained one
    assert counts_of(engine, lambda: engine.step(batch)) == {
        "gather": 2 * (1 + 2) + 1 + 1,
        "reduce": 1 + 1 + 1,
        "exchange": 1,
    }
