"""Train on three devices, then resume on two: other hardware, another plan, the same run.

    python examples/resume_elsewhere.py

A checkpoint holds whole tensors by name, and the place in the data is one number, so neither
depends on the plan. Only the cluster changes, by `--set cluster=...` on the command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("gpt2-text.yaml")
STEPS = 6
TWO_DEVICES = (
    "[{class: fast, emulate: 4 GFLOP/s, memory: 24 MiB},"
    " {class: slow, emulate: 1 GFLOP/s, memory: 48 MiB}]"
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        first = train(run, steps=STEPS // 2)
        # The learning rate follows the job's own number of steps, hence a constant one here.
        rest = train(run, "--resume", "--set", f"cluster={TWO_DEVICES}", steps=STEPS)
    for name, part in (("three devices", first), ("two devices", rest)):
        losses = " ".join(f"{loss:.4f}" for loss in part["losses"])
        print(f"{name}: losses {losses}, {part['tokens_per_s']:.0f} tokens/s")


def train(run: Path, *options: str, steps: int) -> dict[str, Any]:
    """`gpumix train` with the job's schedule made constant; what `--json` prints."""
    command = [sys.executable, "-m", "gpumix", "train", str(JOB), "--json", *options]
    for setting in (f"output_dir={run}", f"max_steps={steps}", "lr_scheduler.type=constant"):
        command += ["--set", setting]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
