"""Profile once, then compare plans; nothing is trained.

    python examples/compare_plans.py

`gpumix profile` measures and writes one JSON file. Planning from it needs no GPU, no torch and
fractions of a second, so it can be done on any machine, for any batch and any strategy.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import gpumix

JOB = Path(__file__).with_name("gpt2-text.yaml")
GLOBAL_BATCHES = (8, 16, 32)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "gpumix", "profile", str(JOB), "--output", str(measured)]
        subprocess.run(command, check=True)
        profile = gpumix.Profile.load(measured)

    for batch in GLOBAL_BATCHES:
        for strategy in ("even", "optimal"):
            try:
                show(gpumix.plan(profile, batch, strategy=strategy))
            except gpumix.GpumixError as error:
                print(f"batch {batch}, {strategy}: {error}")


def show(plan: gpumix.Plan) -> None:
    """The prediction, and who computes and who stores what."""
    assert plan.prediction is not None
    print(
        f"batch {plan.global_batch}, {plan.strategy}: {plan.prediction.step_s * 1e3:.0f} ms a step,"
        f" {plan.prediction.tokens_per_s:.0f} tokens/s"
    )
    for rank, (worker, expected) in enumerate(zip(plan.workers, plan.prediction.workers)):
        busy = (expected.forward_s + expected.backward_s) / plan.prediction.step_s
        own = [f"stage {n + 1}" for n in plan.stages_of(rank)] if len(plan.stages) > 1 else []
        print(
            f"    {', '.join([worker.device, *own])}: {worker.samples:2} samples, "
            f"{worker.state_share:4.0%} of the {'stage' if own else 'state'}, "
            f"{expected.peak_bytes / 2**20:.0f} MiB at its peak, busy {busy:.0%}"
        )


if __name__ == "__main__":
    main()
