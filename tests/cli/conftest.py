"""The folder of a run that was planned and trained for a few steps."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gpumix.schema.plan.plan import Plan


@cache
def planned() -> Plan:
    """Of what `verbs.measured` has."""
    from gpumix.planner.plan import plan as make_plan
    from helpers.runs.verbs import measured

    return make_plan(measured(), 8)


@pytest.fixture
def run(tmp_path):
    """A folder with a plan, and a few steps of a run."""
    from helpers.runs.verbs import measured

    folder = tmp_path / "first"
    planned().save(folder / "plan.json")
    measured().save(folder / "profile.json")
    steps = [
        {"event": "step", "step": n, "loss": 3.0 / n, "step_s": 0.5, "tokens_per_s": 2048.0}
        for n in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    return folder
