"""The job on a Ray of this machine, where Ray is installed."""

from __future__ import annotations

import re

import pytest

from helpers.scripts.example_runs import python

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_job_trains_on_workers_of_ray(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    changes = ["--set", f"output_dir={tmp_path / 'run'}", "--set", "max_steps=10"]
    # Ray starts services of its own with Python, from a process with threads: not to be forked.
    out = python("examples/ray_job.py", *changes, cache=cache, fresh=True)
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", out)]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert re.search(r"^\d+ tokens/s$", out, re.M)
    assert (tmp_path / "run" / "plan.json").is_file()
