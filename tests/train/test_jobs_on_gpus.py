"""`gpumix train` on the GPUs that are found. `pytest -m gpu tests/train`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from gpumix.engine.comm.wait_clock import WaitClock
from gpumix.hardware.timestamps import make_device_clock
from gpumix.schema.plan.step_trace import Trace
from gpumix.train.monitor.step_timer import StepTimer
from helpers.runs.jobs import metrics, plan_for, toy, train, write_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# Measured once for all. GPUs would choose bf16.
WIDE = {"model": toy(width=256, blocks=4), "global_batch_size": 16, "precision": "fp32"}


def test_a_job_trains_as_on_the_cpu(tmp_path):
    """Detects, measures, plans and trains; memory stays within what was planned."""
    changes = {"max_steps": 4} | WIDE
    found = train(write_job(tmp_path / "gpu", cluster=None, **changes))
    job = write_job(tmp_path / "cpu", **changes)
    expected = train(job, plan=plan_for(job, (8, 4, 4)))
    assert found.losses == pytest.approx(expected.losses, rel=1e-3, abs=1e-5)
    for record in metrics(tmp_path / "gpu" / "run", "classes")[-1]["classes"]:
        assert record["peak_bytes"] <= record["planned_peak_bytes"] / 0.97
        assert 0 < record["mfu"] <= record["hfu"] < 1
    for record in metrics(tmp_path / "gpu" / "run"):
        assert sum(record["shares"].values()) == pytest.approx(1.0)
        assert min(record["shares"].values()) >= 0


def test_a_gap_on_the_gpu_is_told_by_its_own_clock():
    """The host waits for data while the device computes: nothing of that is lost."""
    device = torch.device("cuda")
    watch = StepTimer(make_device_clock(device), WaitClock(device), WaitClock(device))

    def slow(seconds: float) -> Iterator[int]:
        time.sleep(seconds)
        yield 0

    for busy_cycles, idle in ((2_000_000_000, False), (0, True)):
        torch.cuda.synchronize()
        torch.cuda._sleep(busy_cycles)  # a second or so: the step before
        watch.begin()
        watch.next_of(slow(0.1))
        watch.computes()
        torch.cuda._sleep(200_000_000)
        torch.cuda.synchronize()
        watch.end()
        assert (watch.last().input > 0.2) == idle


@pytest.mark.extended
def test_a_step_is_traced_on_the_clock_of_the_gpu(tmp_path):
    """What is computed begins and ends within the step that the host measured, in its order."""
    train(write_job(tmp_path, cluster=None, trace_step=5, **WIDE))
    events = Trace.load(tmp_path / "run" / "trace.json").traceEvents
    spans = [e for e in events if e.ph == "X" and e.pid == 1 and e.tid in (100, 101)]
    spans.sort(key=lambda e: (e.ts, e.dur))
    assert [e.name for e in spans if e.cat == "forward"] == [
        "forward (root)", *(f"forward blocks.{i}" for i in range(4))
    ]  # fmt: skip
    ends = [0, *(e.ts + e.dur for e in spans)]
    assert [e.ts for e in spans] == ends[:-1]
    assert ends[-1] == round(1e6 * metrics(tmp_path / "run")[4]["step_s"])
