"""Adafactor and Muon in pipeline stages: the ranks of each stage sum and exchange among themselves,
and those of several stages what these share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpumix.schema.plan.plan import Plan
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import checkpointer
from helpers.training.reference import joined, pieces_of
from helpers.training.staging import EVERY, rows, staged_engine, staged_plan
from helpers.training.whole_optimizers import (
    STEPS,
    assert_close,
    expected_after,
    is_hidden,
    make,
    trained_by_torch,
    update_pieces,
)

FACTORY = EVERY["gpt2"].factory
LAYOUTS = {
    "1 + 1": (rows([6], [6]), {"zero_stage": 1}),
    "2 + 1, replicas": (rows([4, 2], [6]), {"zero_stage": 0}),
    "2 + 2, ragged": (rows([4, 2], [2, 4], state=[[3, 1], [1, 4]]), {"zero_stage": 3}),
    "1 + 2 + 1, one stores nothing": (
        rows([6], [4, 2], [6], state=[[1], [0, 1], [1]]),
        {"zero_stage": 2},
    ),
}
FEW = left_out(LAYOUTS, ["2 + 2, ragged"])


def plan_of(layout: str) -> Plan:
    stages, settings = LAYOUTS[layout]
    return staged_plan("gpt2", stages, **settings)


def _train(plan_json: str, kind: str) -> Any:
    engine = staged_engine("gpt2", Plan.model_validate_json(plan_json))
    optimizer = make(kind, engine)
    before = engine.comm.counts.copy()
    update_pieces(engine, optimizer, range(STEPS))
    return pieces_of(engine), dict(engine.comm.counts - before)


@pytest.mark.parametrize("layout", FEW)
@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_results_are_those_of_torch(kind, layout):
    """Of the embedding too, which the first stage and the last one share."""
    plan = plan_of(layout)
    found = run_ranks(_train, len(plan.workers), plan.model_dump_json(), kind)
    pieces = joined([pieces for pieces, _ in found])
    expected = expected_after(kind, FACTORY)
    assert_close(pieces, expected)
    if kind == "muon":
        alone = staged_plan("gpt2", rows([6]), zero_stage=1)
        [(whole, _)] = run_ranks(_train, 1, alone.model_dump_json(), kind)
        values = joined([whole])
        hidden = [name for name, value in values.items() if is_hidden(name, value.shape)]
        assert len(hidden) > 4
        for name in hidden:
            assert np.array_equal(pieces[name], values[name]), name


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


@pytest.mark.parametrize("kind", left_out(["adafactor", "muon"], ["adafactor"]))
def test_stages_take_up_what_other_stages_saved(kind, tmp_path):
    before, after = plan_of("2 + 2, ragged"), plan_of("1 + 1")
    run_ranks(_save, 4, tmp_path, before.model_dump_json(), kind)
    found = run_ranks(_resume, 2, tmp_path, after.model_dump_json(), kind)
    model, _ = trained_by_torch(kind, FACTORY)
    expected = {n: p.detach().numpy() for n, p in model.named_parameters()}
    assert_close(joined(found), expected)
