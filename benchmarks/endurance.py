"""Whether a run may go on for weeks: memory of its processes, its checkpoints, and its page.

One run of two ranks takes many short steps and writes a checkpoint every so many, of which the
newest three are kept, while the clock of its ranks jumps by a day again and again. The memory of
each of its processes, resident and of no file, is looked at once a second. Its slope is that of a
straight line through the means of twenty parts of the run, the first 60% left out, in which the
caches of printed words fill; its noise is the standard error of that slope. Another run, of a
million steps, is only written as logs: a page of it is made.

    python benchmarks/endurance.py [--json] [--steps 20000] [--checkpoints 500] [--long 1000000]

Figures: `steps`, `checkpoints`, `checkpoints_left`, `memory_slope_bytes_per_step` (of the process
where it is steepest, beyond twice its noise; 0 where it is within), `slope_launcher`,
`noise_launcher` and so on of `server` and each `rank`, `log_bytes_per_step`, `report_s`,
`report_cpu_s`, `report_mb`, `report_page_mb`, `resume_cpu_s`, `long_log_mb`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import numpy as np

from common import (
    BENCHMARKS,
    TESTS,
    USER_CODE,
    Figures,
    environment,
    make_parser,
    print_figures,
    records,
)
from endured.long_log import page_costs, resume_costs, write_log
from helpers.attacks import file_attacks
from helpers.runs import jobs

PARTS, WARM = 20, 0.6
LIMITS = {"report_s": 10.0, "report_mb": 300.0, "memory_slope_bytes_per_step": 0.0}
LOOK_S = 1.0
FOLDERS = (TESTS, USER_CODE, BENCHMARKS / "endured")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--checkpoints", type=int, default=500)
    parser.add_argument("--long", type=int, default=1_000_000, help="steps of the run that is read")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = _of_long_log(folder / "long", arguments.long)
        figures |= _of_run(folder / "run", arguments.steps, arguments.checkpoints)
    print_figures(figures, as_json=arguments.json)
    missed = [key for key, most in LIMITS.items() if float(figures[key] or 0) > most]
    print(*(f"{key} is {figures[key]}" for key in missed), sep="\n", file=sys.stderr)
    sys.exit(bool(missed))


def _of_long_log(folder: Path, steps: int) -> Figures:
    folder.mkdir()
    for name, text in file_attacks.documents().items():
        (folder / name).write_text(text)
    size = write_log(folder, steps)
    costs = page_costs(folder) | {"resume_cpu_s": resume_costs(folder, steps - 500)}
    return {"long_log_mb": round(size / 1e6, 1)} | {n: round(v, 2) for n, v in costs.items()}


def _of_run(folder: Path, steps: int, checkpoints: int) -> Figures:
    job = jobs.write_job(
        folder,
        model={"factory": "jumping:model"},
        data={"factory": "toys:tokens"},
        cluster=jobs.PAIR,
        max_steps=steps,
        save_steps=max(1, steps // checkpoints),
        save_total_limit=3,
        logging_steps=10,
        timeout=120,
    )
    jobs.plan_for(job, (4, 4), (0.5, 0.5)).save(folder / "plan.json")
    seen = _watched(folder)
    figures: Figures = {"steps": len(records(folder / "run", "step"))}
    figures["checkpoints"] = len(records(folder / "run", "checkpoint"))
    figures["checkpoints_left"] = len(list((folder / "run" / "checkpoints").iterdir()))
    size = (folder / "run" / "metrics.jsonl").stat().st_size
    figures["log_bytes_per_step"] = round(size / steps)
    steepest = 0.0
    for name, points in seen.items():
        slope, noise = _slope([p for p in points if p[0] >= WARM * steps])
        figures |= {f"slope_{name}": round(slope, 2), f"noise_{name}": round(noise, 2)}
        steepest = max(steepest, slope - 2 * noise)
    figures["memory_slope_bytes_per_step"] = round(steepest, 2)
    return figures


def _watched(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """By process, (step, bytes) once a second while the run goes on."""
    env = environment(*FOLDERS) | {"OMP_NUM_THREADS": "1"}
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), "GLOO_SOCKET_IFNAME": "lo"}
    words = ["train", "job.yaml", "--plan", "plan.json", "--allow", "jumping", "--allow", "toys"]
    seen: dict[str, list[tuple[int, int]]] = {}
    with (folder / "said").open("w") as said:
        run = subprocess.Popen(
            [sys.executable, "-m", "gpumix", *words], cwd=folder, env=env, stdout=said, stderr=said
        )
        while run.poll() is None:
            time.sleep(LOOK_S)
            step = _step(folder / "run")
            for name, process in _processes(run.pid).items() if step else ():
                with suppress(OSError):
                    seen.setdefault(name, []).append((step, _memory_bytes(process)))
    if run.returncode:
        print((folder / "said").read_text()[-2000:], file=sys.stderr)
        sys.exit(run.returncode)
    return seen


def _step(run: Path) -> int:
    with suppress(OSError, ValueError):
        return int(json.loads((run / "progress.json").read_text())["step"])
    return 0


def _processes(launcher: int) -> Mapping[str, int]:
    """The launcher, the server that ranks are forked from, and the ranks in their order."""
    servers = [pid for pid in _children(launcher) if len(_children(pid)) >= 2]
    ranks = [pid for server in servers[:1] for pid in _children(server)]
    found = {"launcher": launcher} | ({"server": servers[0]} if servers else {})
    return found | {f"rank_{number}": pid for number, pid in enumerate(sorted(ranks))}


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _memory_bytes(process: int) -> int:
    """Resident memory without files. Pages that are shared since a fork count like written ones."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * sum(
        int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))
    )


def _slope(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Bytes a step, and the standard error of that."""
    parts = [part for part in np.array_split(np.array(points, dtype=float), PARTS) if len(part)]
    if len(parts) < 3:
        return 0.0, 0.0
    steps = np.array([fmean(part[:, 0]) for part in parts])
    sizes = np.array([fmean(part[:, 1]) for part in parts])
    slope, begin = np.polyfit(steps, sizes, 1)
    left = sizes - (begin + slope * steps)
    spread = np.sqrt(np.sum(left**2) / (len(parts) - 2))
    return float(slope), float(spread / np.sqrt(np.sum((steps - steps.mean()) ** 2)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
