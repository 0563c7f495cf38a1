"""Compiled units of several stages train like one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch._dynamo.backends.registry import lookup_backend

from gpumix.engine import prepare as preparing
from gpumix.engine.unit.regional_compile import compile_units
from gpumix.schema.plan.stage import Mode
from helpers.extended import chosen, every_second
from helpers.training.reference import Trained, joined
from helpers.training.staging import Row, on_devices, rows, run_in_turn, staged_plan, train_rank
from helpers.training.turns import STEPS, assert_same

KEPT = rows([6], [6], mode=Mode(recompute=False))
CASES: dict[str, tuple[list[Row], dict[str, Any], tuple[bool, bool]]] = {
    "1f1b, some": (rows([6], [6]), {"zero_stage": 1}, (True, False)),
    "zero-bubble, all": (KEPT, {"zero_stage": 1, "schedule": "zero-bubble"}, (True, True)),
}


def _train(plan_json: str) -> tuple[list[float], Any, int]:
    """Losses, what was trained, and how many graphs were compiled."""
    backend, graphs = lookup_backend("aot_eager"), []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return backend(graph, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "compile_units", partial(compile_units, backend=counting))
        losses, pieces = train_rank(plan_json, "gpt2", STEPS)
    return losses, pieces, len(graphs)


@pytest.fixture(scope="module")
def trained(request):
    plans = {
        case: on_devices(
            staged_plan("gpt2", layout, **settings), *({"compile": one} for one in compiled)
        )
        for case, (layout, settings, compiled) in chosen(request, CASES).items()
    }
    return plans, run_in_turn(_train, {case: (plan, ()) for case, plan in plans.items()})


@pytest.mark.parametrize("case", every_second(CASES))
def test_training(case, trained):
    plans, found = trained
    losses, pieces, graphs = zip(*found[case])
    assert tuple(count > 0 for count in graphs) == CASES[case][2]
    assert_same("gpt2", plans[case], list(losses), Trained(losses[0], joined(pieces)))
