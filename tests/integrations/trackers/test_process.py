"""The process of trackers: what it brings along, and how one takes over from another."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpumix.hardware.host.environment import TELEMETRY_OPT_OUTS, tracker_environment
from gpumix.schema.job.job import Job
from gpumix.train.run_figures.writer import RunLog
from gpumix.train.run_log import run_files
from gpumix.train.run_log.tracker_process import MODULE
from helpers.processes.waiting import wait_until
from helpers.runs.jobs import plan_for
from helpers.runs.reported_runs import job_for, trains


def test_it_does_not_import_torch():
    code = f"import sys, {MODULE}.__main__\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_in_its_environment_sends_anything_anywhere(monkeypatch):
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://example.invalid")
    monkeypatch.setenv("TRACKIO_DIR", "/kept")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    found = tracker_environment()
    assert "TRACKIO_SERVER_URL" not in found
    assert found["TRACKIO_DIR"] == "/kept"
    assert {name: found[name] for name in TELEMETRY_OPT_OUTS} == TELEMETRY_OPT_OUTS


@contextmanager
def process(job: Job, since: float) -> Iterator[subprocess.Popen[str]]:
    """With Prometheus, as `train/run_log/tracker_process.py` starts it."""
    started = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        beginning = {"job": job.model_dump_json(), "since": since, "end_s": 30.0}
        started.stdin.write(json.dumps(beginning) + "\n")
        started.stdin.flush()
        yield started
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def says(started: subprocess.Popen[str], patience_s: float) -> str:
    heard, _, _ = select.select([started.stdout], [], [], patience_s)
    return started.stdout.readline() if heard else ""


@pytest.mark.extended
def test_one_ends_when_the_run_is_gone_without_a_word_and_the_next_goes_on(tmp_path):
    """As when all ranks begin anew: the next one waits for the other's last word."""
    job = job_for(tmp_path, {"prometheus": {"textfile": "run.prom"}})
    plan_for(tmp_path / "job.yaml").save(job.output_dir / run_files.PLAN)
    shown = tmp_path / "run.prom"
    with process(job, since=1.0) as first:
        assert json.loads(says(first, 60)) == {"ready": True}
        with RunLog(job.output_dir, plan_for(tmp_path / "job.yaml"), 6) as log:
            trains(log, 1, 2)
            wait_until(shown.exists)
            with process(job, since=0.0) as second:
                assert says(second, 1.0) == ""
                first.stdin.close()
                assert first.wait(30) == 0
                assert 'gpumix_run_state{run="run",state="interrupted"} 1.0' in shown.read_text()
                assert json.loads(says(second, 60)) == {"ready": True}
                trains(log, 3, 3)
                second.stdin.write("finished\n")
                second.stdin.close()
                assert second.wait(30) == 0
    assert 'state="finished"' in shown.read_text()
    marks = json.loads((job.output_dir / run_files.TRACKERS / "prometheus.json").read_text())
    assert (marks["steps"], marks["since"]) == ({"step": 3}, 1.0)
