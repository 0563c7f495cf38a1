"""Jobs are those of the tests of training, profiles those of the verbs that decide."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in ("train", "planner", "cli"):
    sys.path.append(str(Path(__file__).parents[1] / folder))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run's folder, and its summary: uneven devices, evaluations, checkpoints, a traced step."""
    from jobs import EMULATED, train, write_job

    folder = tmp_path_factory.mktemp("trained")
    job = write_job(
        folder,
        cluster=EMULATED,
        steps=8,
        trace_step=5,
        evaluation={"every_steps": 4, "batches": 1},
        checkpoint={"every_steps": 4},
        profile={"cache": "profiles", "budget": 5},
    )
    return folder / "run", train(job)
