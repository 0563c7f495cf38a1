"""The folder of a run of many steps, as `RunLog` writes it, and what a page of it takes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

PAGE = """
import sys, time
began = time.perf_counter()
sys.argv = ["gpumix", "report", {folder!r}]
from gpumix.cli import main
try:
    main()
except SystemExit as left:
    assert not left.code, left.code
seconds = time.perf_counter() - began
lines = open("/proc/self/status").read().splitlines()
most = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
print(seconds, time.process_time(), most / 1024)
"""


def write_log(folder: Path, steps: int) -> int:
    """The metrics of a run of so many steps; their bytes. Its plan must be there."""
    from dataclasses import asdict

    from gpumix.schema.plan.plan import Plan
    from gpumix.train.run_log.metrics import ClassRecord, RankRecord, StepRecord
    from gpumix.train.run_log.time_breakdown import TimeShares

    plan = Plan.load(folder / "plan.json")
    parts = {
        name: 1 / len(TimeShares.__dataclass_fields__) for name in TimeShares.__dataclass_fields__
    }
    shares = TimeShares(**parts)
    kinds = sorted({worker.device_class for worker in plan.workers})
    classes = [
        asdict(ClassRecord(kind, 1, 4, 0.9, 2**30, 2**30, 0, {"state": 2**20}, {"laid out": 2**20},
                           shares=shares, tokens_per_s=1e4, mfu=0.4, hfu=0.45))
        for kind in kinds
    ]  # fmt: skip
    ranks = [
        asdict(RankRecord(worker.device, worker.device_class, 0.9, 2**30, 0, shares=shares))
        for worker in plan.workers
    ]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            now = 1.7e9 + step
            loss = 2 + 8 * math.exp(-step / steps * 5)
            record = StepRecord(step, loss, 1e-3, 0.7, 0.5, 2048.0, step * 1024, shares, 8)
            file.write(json.dumps({"event": "step", "time": now, **asdict(record)}) + "\n")
            if step % 10 == 0:
                for event, told in (("classes", classes), ("ranks", ranks)):
                    line = {"event": event, "time": now, "step": step, event: told}
                    file.write(json.dumps(line) + "\n")
            if step % 1000 == 0:
                line = {"event": "checkpoint", "time": now, "step": step, "path": f"step-{step}"}
                file.write(json.dumps(line | {"seconds": 1.0, "stalled_s": 0.1}) + "\n")
    now = {"state": "training", "why": "", "step": steps, "steps": 2 * steps, "loss": 2.0}
    now |= {"tokens_per_s": 2048.0, "step_s": 0.5, "remaining_s": steps / 2, "time": time.time()}
    (folder / "progress.json").write_text(json.dumps(now))
    return (folder / "metrics.jsonl").stat().st_size


def page_costs(folder: Path) -> dict[str, float]:
    """What a page of that run takes in a process of its own: seconds, those of a processor, and
    the most MiB of memory."""
    told = subprocess.run(
        [sys.executable, "-c", PAGE.format(folder=str(folder))],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    seconds, cpu_s, mib = map(float, told)
    size = (folder / "report.html").stat().st_size / 2**20
    return {"report_s": seconds, "report_cpu_s": cpu_s, "report_mb": mib, "report_page_mb": size}


def resume_costs(folder: Path, step: int) -> float:
    """Seconds of a processor that a run takes to find where its log goes on."""
    from gpumix.schema.plan.plan import Plan
    from gpumix.train.run_figures.writer import RunLog

    plan, began = Plan.load(folder / "plan.json"), time.process_time()
    with RunLog(folder, plan, None, done=step):
        pass
    return time.process_time() - began
