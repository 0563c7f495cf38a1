"""`jobs.py`, which runs the command line, lies with the tests of `train`; profiles that are made up
lie with those of the planner."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

for folder in ("train", "planner"):
    sys.path.append(str(Path(__file__).parents[1] / folder))


@pytest.fixture
def run(tmp_path):
    """A folder with a plan, and a few steps of a run."""
    from verbs import measured

    from gpumix.planner.plan import plan as make_plan

    folder = tmp_path / "first"
    plan, profile = make_plan(measured(), 8), measured()
    plan.save(folder / "plan.json")
    profile.save(folder / "profile.json")
    steps = [
        {"event": "step", "step": n, "loss": 3.0 / n, "step_s": 0.5, "tokens_per_s": 2048.0}
        for n in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    return folder
