"""Cases of an architecture and a plan each, which ranks that are started once train in turn, and
which are held against one process."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pytest

from gpumix.schema.plan.plan import Plan
from helpers.extended import chosen
from helpers.training.reference import Trained, train_alone, worst_error
from helpers.training.staging import EVERY, Row, staged_plan, train_in_turn

STEPS = 2
TOLERANCE = 1e-5


def in_turn(cases: Mapping[str, tuple[str, list[Row], dict[str, Any]]]):
    """A fixture: what all of these cases come to that are tried, of an architecture each."""

    @pytest.fixture(scope="module")
    def found(request):
        plans = {
            case: (name, staged_plan(name, layout, **settings))
            for case, (name, layout, settings) in chosen(request, cases).items()
        }
        return plans, train_in_turn(plans, STEPS)

    return found


def assert_case(case: Hashable, found) -> None:
    plans, trained = found
    assert_same(*plans[case], *trained[case])


def assert_same(name: str, plan: Plan, losses: list[list[float]], found: Trained) -> None:
    """As one process comes to."""
    expected = train_alone(EVERY[name], plan.global_batch, STEPS)
    assert worst_error(found, expected) < TOLERANCE
    assert all(seen == losses[0] for seen in losses)
