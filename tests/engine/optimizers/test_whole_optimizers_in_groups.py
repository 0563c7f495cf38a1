"""Adafactor and Muon in tensor-parallel groups: as torch's own over the whole parameters."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from gpumix.schema.plan.plan import Plan
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import checkpointer
from helpers.training.reference import batches, joined, pieces_of
from helpers.training.staging import EVERY, own_samples, rows, staged_engine, staged_plan
from helpers.training.whole_optimizers import (
    STEPS,
    assert_close,
    expected_after,
    is_hidden,
    make,
    trained_by_torch,
    update_pieces,
)

KINDS = ("adafactor", "muon")
GPT2 = EVERY["gpt2"]
FACTORY = GPT2.factory
# Muon rounds the momentum to bf16, which makes more of a difference in the last digit.
TOLERANCES = {"adafactor": 1e-5, "muon": 1e-4}
LAYOUTS = {
    "a group, ZeRO 0": (rows([5], tensor=[2]), {"zero_stage": 0}),
    "a group, ZeRO 1": (rows([5], tensor=[2]), {"zero_stage": 1}),
    "two groups, ZeRO 0": (rows([4, 3], tensor=[2]), {"zero_stage": 0}),
    "two groups, ragged": (rows([4, 3], state=[[1, 3]], tensor=[2]), {"zero_stage": 3}),
    "one rank and a group": (rows([4, 3], tensor=[(1, 2)]), {"zero_stage": 2}),
    "one rank and a group, ZeRO 0": (rows([4, 3], tensor=[(1, 2)]), {"zero_stage": 0}),
    "a group, then two ranks": (rows([6], [4, 2], tensor=[2, 1]), {"zero_stage": 3}),
}
FEW = left_out(LAYOUTS, LAYOUTS.keys() - {"two groups, ragged", "one rank and a group"})


def plan_of(layout: str) -> Plan:
    stages, settings = LAYOUTS[layout]
    return staged_plan("gpt2", stages, **settings)


def _train(plan_json: str, kind: str) -> Any:
    engine = staged_engine("gpt2", Plan.model_validate_json(plan_json))
    optimizer = make(kind, engine)
    before = engine.comm.counts.copy()
    update_pieces(engine, optimizer, range(STEPS))
    return pieces_of(engine), dict(engine.comm.counts - before)


@functools.cache
def trained(layout: str, kind: str) -> Any:
    plan = plan_of(layout)
    return run_ranks(_train, len(plan.workers), plan.model_dump_json(), kind)


@pytest.mark.parametrize("layout", FEW)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_torch(kind, layout):
    found = joined([pieces for pieces, _ in trained(layout, kind)])
    assert_close(found, expected_after(kind, FACTORY))


@pytest.mark.parametrize("layout", FEW)
def test_muon_gives_the_same_bits_however_matrices_are_divided(layout):
    alone = staged_plan("gpt2", rows([6]), zero_stage=1)
    [(pieces, _)] = run_ranks(_train, 1, alone.model_dump_json(), "muon")
    whole = joined([pieces])
    hidden = [name for name, value in whole.items() if is_hidden(name, value.shape)]
    assert len(hidden) > 4
    found = joined([pieces for pieces, _ in trained(layout, "muon")])
    for name in hidden:
        assert np.array_equal(found[name], whole[name]), name


@pytest.mark.parametrize("layout", FEW)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_stay_equal(kind, layout):
    """Of what several ranks have, as in replicas: bit by bit."""
    together = joined([pieces for pieces, _ in trained(layout, kind)])
    for pieces, _ in trained(layout, kind):
        for name, values in joined([pieces]).items():
            stored = ~np.isnan(values)
            assert np.array_equal(values[stored], together[name][stored]), name


@pytest.mark.parametrize("kind", KINDS)
def test_two_collectives_a_step(kind):
    expected = {"adafactor": {"all_reduce": 2 * STEPS}, "muon": {"exchange_parts": 2 * STEPS}}
    for _, counts in trained("two groups, ragged", kind):
        assert counts == expected[kind]


def _save(folder: Any, plan_json: str, kind: str) -> None:
    engine = staged_engine("gpt2", Plan.model_validate_json(plan_json))
    optimizer = make(kind, engine)
    update_pieces(engine, optimizer, range(2))
    checkpointer(folder).save(2, engine, optimizer, cursor={})


def _resume(folder: Any, plan_json: str, kind: str) -> Any:
    engine = staged_engine("gpt2", Plan.model_validate_json(plan_json))
    optimizer = make(kind, engine)
    checkpointer(folder).load(engine, optimizer)
    update_pieces(engine, optimizer, range(2, STEPS))
    return pieces_of(engine)


RESUMED = {
    "from groups": ("two groups, ragged", None),
    "into groups": (None, "two groups, ragged"),
    "into others": ("one rank and a group", "a group, then two ranks"),
    "into one rank and a group": ("a group, ZeRO 0", "one rank and a group"),
}


@pytest.mark.parametrize("way", left_out(RESUMED, ["into one rank and a group"]))
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_do_not_depend_on_groups(kind, way, tmp_path):
    without = staged_plan("gpt2", rows([3, 2]), zero_stage=2)
    before, after = (without if one is None else plan_of(one) for one in RESUMED[way])
    run_ranks(_save, len(before.workers), tmp_path, before.model_dump_json(), kind)
    found = run_ranks(_resume, len(after.workers), tmp_path, after.model_dump_json(), kind)
    model, _ = trained_by_torch(kind, FACTORY)
    assert_close(joined(found), {n: p.detach().numpy() for n, p in model.named_parameters()})


def _losses(plan_json: str, kind: str) -> list[float]:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    optimizer = make(kind, engine)
    [batch] = batches(GPT2, plan.global_batch, 1)
    losses = []
    for _ in range(STEPS):
        losses.append(engine.step(own_samples(plan, engine.comm.rank, batch)).item())
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("layout", FEW)
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_one_process(kind, layout):
    plan = plan_of(layout)
    alone = staged_plan("gpt2", rows([plan.global_batch]), zero_stage=1)
    [expected] = run_ranks(_losses, 1, alone.model_dump_json(), kind)
    assert expected[-1] < expected[0]
    for losses in run_ranks(_losses, len(plan.workers), plan.model_dump_json(), kind):
        assert losses == pytest.approx(expected, rel=TOLERANCES[kind])
