"""`gpumix train` on the GPUs that are found. `pytest -m gpu tests/train`."""

from __future__ import annotations

import pytest
import torch
from jobs import metrics, toy, train, write_job

from gpumix.spec.trace import Trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_job_trains_as_on_the_cpu(tmp_path):
    """Detects, measures, plans and trains; memory stays within what was planned."""
    changes = {"model": toy(width=256, blocks=4), "steps": 8, "global_batch": 16}
    found = train(write_job(tmp_path / "gpu", cluster=None, **changes))
    expected = train(write_job(tmp_path / "cpu", **changes))
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    for record in metrics(tmp_path / "gpu" / "run", "classes")[-1]["classes"]:
        assert record["peak_bytes"] <= record["planned_peak_bytes"] / 0.97


def test_a_step_is_traced_on_the_clock_of_the_gpu(tmp_path):
    """What is computed begins and ends within the step that the host measured, in its order."""
    train(write_job(tmp_path, cluster=None, trace_step=5, model=toy(width=256, blocks=4)))
    events = Trace.load(tmp_path / "run" / "trace.json").traceEvents
    spans = [e for e in events if e.ph == "X" and e.pid == 1 and e.tid in (100, 101)]
    spans.sort(key=lambda e: (e.ts, e.dur))
    assert [e.name for e in spans if e.cat == "forward"] == [
        "forward (root)", *(f"forward blocks.{i}" for i in range(4))
    ]  # fmt: skip
    ends = [0, *(e.ts + e.dur for e in spans)]
    assert [e.ts for e in spans] == ends[:-1]
    assert ends[-1] == round(1e6 * metrics(tmp_path / "run")[4]["step_s"])
