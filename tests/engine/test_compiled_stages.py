"""Compiled units of several stages train like one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch._dynamo.backends.registry import lookup_backend
from turns import STEPS, assert_same

from gpumix.engine import prepare as preparing
from gpumix.engine.compiled import compile_units
from gpumix.spec.stage import Mode
from reference import Trained, joined
from staging import Row, on_devices, rows, run_in_turn, staged_plan, train_rank

KEPT = rows([6], [6], mode=Mode(recompute=False))
CASES: dict[tuple[str, str], tuple[list[Row], dict[str, Any]]] = {
    ("gpt2", "1f1b, 1"): (rows([6], [6]), {"zero_stage": 1}),
    ("gpt2", "zero-bubble, 1"): (KEPT, {"zero_stage": 1, "schedule": "zero-bubble"}),
}
COMPILED = ((True, True), (True, False))


def _train(plan_json: str, name: str) -> tuple[list[float], Any, int]:
    """Losses, what was trained, and how many graphs were compiled."""
    backend, graphs = lookup_backend("aot_eager"), []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return backend(graph, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "compile_units", partial(compile_units, backend=counting))
        losses, pieces = train_rank(plan_json, name, STEPS)
    return losses, pieces, len(graphs)


@pytest.fixture(scope="module")
def trained():
    plans = {}
    for (name, way), (layout, settings) in CASES.items():
        plan = staged_plan(name, layout, **settings)
        for said in COMPILED:
            plans[name, way, said] = on_devices(plan, *({"compile": one} for one in said))
    return plans, run_in_turn(_train, {key: (plan, key[:1]) for key, plan in plans.items()})


@pytest.mark.parametrize("said", COMPILED, ids=["all", "some"])
@pytest.mark.parametrize("name, way", CASES)
def test_training(name, way, said, trained):
    plans, found = trained
    losses, pieces, graphs = zip(*found[name, way, said])
    assert [count > 0 for count in graphs] == list(said[: len(graphs)])
    assert_same(name, plans[name, way, said], list(losses), Trained(losses[0], joined(pieces)))
