"""Train a job on a Ray cluster, with one worker per device.

    python examples/ray_job.py                       # emulated devices, on a Ray of this machine
    python examples/ray_job.py job.yaml --workers A100=2 T4=4      # workers with one GPU each

Names are types of accelerators as Ray labels its nodes; `Workers` takes any labels and resources.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpumix.integrations.ray import Workers, train

JOB = Path(__file__).parent / "gpt2-text.yaml"
EMULATED = {"emulated": Workers(3, labels={}, resources={"CPU": 0.5})}  # as many as that job has


def told(event: dict[str, Any]) -> None:
    if "loss" in event:
        print(f"step {event['step']}: loss {event['loss']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, nargs="?", default=JOB)
    parser.add_argument("--workers", nargs="*", default=[], metavar="TYPE=NUMBER")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    asked = {name: int(number) for name, number in (one.split("=") for one in args.workers)}
    summary = train(args.job, asked or EMULATED, overrides=args.set, on_metrics=told)
    print(f"{summary['tokens_per_s']:.0f} tokens/s")


if __name__ == "__main__":
    main()
