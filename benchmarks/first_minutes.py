"""What the first minutes with gpumix cost: a plan, the help, the install, an own job.

    python benchmarks/first_minutes.py [--json] [--demo] [--job]

Figures: `plan_cpu_s` (CPU time of `gpumix plan` for a 7B on 2 RTX 4090 and 4 RTX 3090, the process
and its start included, the least of five) and `plan_wall_s`; `help_cpu_s` of `gpumix --help`;
`planner_install_mb` (megabytes that `pip install .` adds to a fresh environment, without torch) and
`planner_package_mb`, of these gpumix alone; `widest_line` of the plan; `own_job_commands` (from
nothing to a report of an own run), and with `--job` whether these train (`init_job_trains`); with
`--demo` `demo_s`, the seconds of `gpumix demo`.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from common import Figures, make_parser, print_figures

ROOT = Path(__file__).resolve().parents[1]
GPUMIX = (sys.executable, "-m", "gpumix")
ASKED = ("plan", "--cluster", "2x rtx4090, 4x rtx3090", "--model", "7B")
ROUNDS = 5
# As after an installation: modules are compiled once, not at each start.
WITH_BYTECODE = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
# From an empty folder with texts: a job, training, a report.
OWN_JOB = (
    ("init", "--data", "texts", "--model", "20M", "--cluster", "cluster.yaml"),
    ("train", "job.yaml", "--set", "max_steps=4", "--set", "lr_scheduler.warmup_steps=0"),
    ("report", "runs/first"),
)
SMALLER = (
    "--set", "sequence_length=32", "--set", "global_batch_size=4",
    "--set", "model.config.num_hidden_layers=2", "--set", "model.config.hidden_size=64",
    "--set", "model.config.num_attention_heads=2", "--set", "model.config.num_key_value_heads=2",
    "--set", "model.config.head_dim=32", "--set", "advanced.profile_cache=cache",
)  # fmt: skip
CLUSTER = (
    "- {class: big, emulate: 40 GFLOP/s, memory: 1 GiB}\n"
    "- {class: small, emulate: 20 GFLOP/s, memory: 512 MiB}\n"
)


def main() -> int:
    arguments = _arguments()
    plans = [timed(*ASKED) for _ in range(ROUNDS)]
    helps = [timed("--help") for _ in range(ROUNDS)]
    figures: Figures = {
        "plan_cpu_s": round(min(cpu_s for cpu_s, _, _ in plans), 3),
        "plan_wall_s": round(min(wall_s for _, wall_s, _ in plans), 3),
        "help_cpu_s": round(min(cpu_s for cpu_s, _, _ in helps), 3),
        "widest_line": max(len(line) for line in plans[0][2].splitlines()),
        "own_job_commands": len(OWN_JOB),
    }
    figures |= installed()
    if arguments.job:
        figures["init_job_trains"] = own_job_trains()
    if arguments.demo:
        figures["demo_s"] = demo_s()
    print_figures(figures, as_json=arguments.json)
    return 0


def timed(*words: str) -> tuple[float, float, str]:
    """CPU seconds and seconds of a command, and what it prints."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        (*GPUMIX, *words), capture_output=True, text=True, check=True, env=WITH_BYTECODE
    )
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begun
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, wall_s, done.stdout


def installed() -> Figures:
    """Megabytes of a fresh environment with the planner, beyond those of an empty one."""
    with tempfile.TemporaryDirectory(prefix="planner-") as folder:
        place = Path(folder)
        venv.create(place, with_pip=True)
        before = _megabytes(place)
        pip = (str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile")
        subprocess.run((*pip, str(ROOT)), check=True, stdout=subprocess.DEVNULL)
        assert not list(place.rglob("site-packages/torch")), "the planner installs torch"
        environment = os.environ | {"PYTHONPATH": ""}
        asked = (str(place / "bin" / "gpumix"), *ASKED)
        subprocess.run(asked, check=True, stdout=subprocess.DEVNULL, env=environment)
        packages = next(place.glob("lib/python*/site-packages"))
        return {
            "planner_install_mb": round(_megabytes(place) - before, 1),
            "planner_package_mb": round(_megabytes(packages / "gpumix"), 1),
        }


def _megabytes(folder: Path) -> float:
    files = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


def own_job_trains() -> bool:
    """Whether the commands from nothing to a report end well, with a smaller model."""
    with tempfile.TemporaryDirectory(prefix="own-") as folder:
        place = Path(folder)
        (place / "texts").mkdir()
        (place / "texts" / "one.txt").write_text("some text of mine\n" * 500)
        (place / "cluster.yaml").write_text(CLUSTER)
        for words in OWN_JOB:
            more = SMALLER if words[0] == "train" else ()
            done = subprocess.run((*GPUMIX, *words, *more), cwd=place, capture_output=True)
            if done.returncode:
                sys.stderr.write(done.stderr.decode())
                return False
    return True


def demo_s() -> float:
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        begun = time.perf_counter()
        subprocess.run((*GPUMIX, "demo"), cwd=folder, check=True, stderr=subprocess.DEVNULL)
        return round(time.perf_counter() - begun, 1)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--demo", action="store_true", help="run the demo too: minutes")
    parser.add_argument("--job", action="store_true", help="train the own job too: a minute")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
