"""Train one model by the four classic kinds of parallelism, and by two mixtures of them.

    python examples/four_strategies.py --out runs/strategies

Four emulated devices, two fast and two slow, train a small Llama on the same data by six plans:

    data       each device has the whole model and computes a part of each batch
    model      each device has some layers; the whole batch goes through one device after another
    pipeline   the same, in micro-batches, so that several devices compute at the same time
    tensor     each device has a part of every layer; all devices compute every sample together
    pipeline x data, pipeline x tensor: two stages of about two devices each

Each strategy is a plan that assigns work and storage to devices, so all of them give the same
losses. The table at the end shows the differences: *idle* is the share of a step in which a device
computes nothing; peaks of memory are in the order of the devices in the stages. `--out` gets a
folder for each run (plan, metrics, the trace of one step for ui.perfetto.dev), a picture of each
step as measured and as planned, and all pictures in `strategies.png`. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

import gpumix
from gpumix.report.step_picture import Panel, draw_panels, read_panel

HERE = Path(__file__).parent
BATCH = 12
STEPS = 5
DEVICES = [
    {"class": "fast", "emulate": "3 GFLOP/s", "memory": "192 MiB", "count": 2},
    {"class": "slow", "emulate": "1.5 GFLOP/s", "memory": "192 MiB", "count": 2},
]
JOB = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "vocab_size": 264,  # 256 bytes, the end of a text, and a round number
        }
    },
    "data": {"text": [str(HERE.parent / "docs")], "pattern": "*.md"},
    "sequence_length": 64,
    "global_batch_size": BATCH,
    "max_steps": STEPS,
    "advanced": {"trace_step": STEPS - 1},
    "optimizer": {"lr": 2e-3},
    "lr_scheduler": {"warmup_steps": 2},
    "cluster": DEVICES,
}

# As the textbook has them: gradients are summed over whole copies, and nothing is computed twice.
TEXTBOOK = {
    "zero_stages": 0,
    "gradient_checkpointing": False,
    "orders": "layered",
    "cross_entropy": "whole",
    "state_on": "device",
    "leave_out": False,
    "sequence_parallel": False,
}


@dataclass(frozen=True)
class Strategy:
    """What the planner is told: a strategy of its own, and techniques that a plan must have."""

    name: str
    title: str
    strategy: str
    techniques: dict[str, Any]

    @property
    def space(self) -> gpumix.Space:
        return gpumix.Space(**TEXTBOOK, **self.techniques)


ONE_STAGE = {"min_pipeline_stages": 1, "max_pipeline_stages": 1, "tensor_parallel_size": 1}
TWO_STAGES = {"min_pipeline_stages": 2, "max_pipeline_stages": 2, "pipeline_schedules": "1f1b"}
STRATEGIES = (
    Strategy("data", "data parallelism", "optimal", ONE_STAGE),
    Strategy("model", "model parallelism", "model", {"tensor_parallel_size": 1}),
    Strategy(
        "pipeline",
        "pipeline parallelism",
        "staged",
        {"min_pipeline_stages": 4, "pipeline_schedules": "1f1b", "tensor_parallel_size": 1},
    ),
    Strategy("tensor", "tensor parallelism", "optimal", ONE_STAGE),
    Strategy(
        "pipeline-data", "pipeline x data", "staged", {**TWO_STAGES, "tensor_parallel_size": 1}
    ),
    Strategy(
        "pipeline-tensor", "pipeline x tensor", "staged", {**TWO_STAGES, "tensor_parallel_size": 2}
    ),
)


def plan_for(one: Strategy, profile: gpumix.Profile) -> gpumix.Plan:
    """The fastest plan of this shape. One shape of the textbook the planner does not make, for it
    is slow: but a plan is a file, and a file can be written by hand."""
    plan = gpumix.plan(profile, BATCH, strategy=one.strategy, space=one.space)
    if one.name == "tensor":
        # A tensor-parallel group has equal parts, so that fast devices wait for slow ones: the
        # planner makes none of unlike devices.
        tp_group = {"tensor": len(plan.workers), "joined": 1}
        all_samples = {"samples": BATCH, "micro_batch": BATCH // 2, "state_share": 1.0}
        return by_hand(plan, stage=tp_group, worker=all_samples)
    return plan


def by_hand(plan: gpumix.Plan, *, stage: dict[str, Any], worker: dict[str, Any]) -> gpumix.Plan:
    """The plan with something else in all of its stages and workers; nothing is predicted of it."""
    written = plan.model_dump()
    for one in written["stages"]:
        one |= stage
        for device in one["workers"]:
            device |= worker
    return gpumix.Plan.model_validate(written | {"prediction": None, "reasons": None})


def train(job: Path, plan: Path, output: Path) -> dict[str, Any]:
    """What `gpumix train --json` tells of a run."""
    told = run("train", job, "--plan", plan, "--set", f"output_dir={output}", "--json")
    return json.loads(told)


def run(*arguments: str | Path) -> str:
    """What a `gpumix` command prints to stdout; where it fails, this ends with what it said."""
    command = [sys.executable, "-m", "gpumix", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def simulate(plan: gpumix.Plan, folder: Path, profile: Path) -> Path | None:
    """The trace of the step as it was planned; None if the plan has no prediction."""
    if plan.prediction is None:
        return None
    path = folder / "simulated.json"
    run("simulate", folder / "plan.json", "--profile", profile, "--trace", path, "--json")
    return path


def row(one: Strategy, plan: gpumix.Plan, told: dict[str, Any], step: Panel) -> list[str]:
    """A row of the table; see `table`."""
    peaks = {device["device"]: mebibytes(device["peak_bytes"]) for device in told["devices"]}
    devices = [
        " ".join(w.device for w in stage.workers) + (" (TP group)" if stage.tensor > 1 else "")
        for stage in plan.stages
    ]
    speed = f"{told['tokens_per_s']:.0f}"
    if told["slower_than_planned"] is not None:
        speed += f" ({told['tokens_per_s'] * (1 + told['slower_than_planned']):.0f})"
    return [
        one.title,
        " | ".join(devices),
        speed,
        f"{step.idle_share:.0%}",
        " | ".join(" ".join(peaks[w.device] for w in stage.workers) for stage in plan.stages),
        f"{sum(device['sent_bytes'] for device in told['devices']) / 2**20:.1f}",
        f"{told['loss']:.5f}",
    ]


def mebibytes(peak_bytes: int | None) -> str:
    """Without a C++ compiler emulated memory is not counted."""
    return "?" if peak_bytes is None else f"{peak_bytes / 2**20:.0f}"


def table(rows: list[list[str]]) -> Table:
    found = Table(title=f"{STEPS} steps on two fast and two slow devices (emulated)")
    for name in (
        "strategy", "stages", "tokens/s (planned)", "idle", "peaks by stages, MiB",
        "sent a step, MiB", "last loss",
    ):  # fmt: skip
        found.add_column(name)
    for cells in rows:
        found.add_row(*cells)
    return found


def agreement(losses: list[float]) -> str:
    """Whether all strategies came to the same loss.

    Sums in another order round otherwise; what is more than that would be an error of gpumix.
    """
    apart = max(losses) / min(losses) - 1
    if apart > 1e-3:
        sys.exit(f"the strategies came to different losses: {losses}")
    return f"all strategies come to the same loss: the last ones are within {apart:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one model by four strategies and more.")
    names = [one.name for one in STRATEGIES]
    parser.add_argument("--out", type=Path, default=Path("runs/strategies"))
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    wanted = [one for one in STRATEGIES if one.name in options.only]
    console = Console(width=None if sys.stdout.isatty() else 160)

    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    job, measured = out / "job.yaml", out / "profile.json"
    job.write_text(yaml.safe_dump(JOB, sort_keys=False), encoding="utf-8")
    console.print("measuring the devices, alone and in tensor-parallel groups ...")
    run("profile", job, "--output", measured)
    profile = gpumix.Profile.load(measured)

    rows, losses, overruns = [], [], 0
    panels: dict[str, list[Panel]] = {}
    for one in wanted:
        plan, folder = plan_for(one, profile), out / one.name
        plan.save(out / f"{one.name}.json")
        told = train(job, out / f"{one.name}.json", folder.absolute())
        step = titled(one.title, read_panel(folder / "trace.json"), told["tokens_per_s"])
        simulated = simulate(plan, folder, measured)
        panels[one.name] = [
            step,
            *([read_panel(simulated, "as it was planned")] if simulated else []),
        ]
        rows.append(row(one, plan, told, step))
        losses.append(told["loss"])
        overruns += told["overruns"]
        console.print(f"{step.title}; trace: {folder / 'trace.json'}")

    console.print(table(rows))
    console.print(agreement(losses))
    if overruns:
        console.print(f"this machine was too busy for the speeds to count: {overruns} overruns")
    if find_spec("matplotlib") is None:
        told = 'no pictures: matplotlib is not installed (pip install ".[pictures]")'
        console.print(told, markup=False)
        return
    for name, of_one in panels.items():
        draw_panels(of_one, out / f"{name}.png")
    draw_panels([step for step, *_ in panels.values()], out / "strategies.png")
    console.print(f"pictures: {out / 'strategies.png'}, and one of each strategy beside it")


def titled(title: str, step: Panel, tokens_per_s: float) -> Panel:
    text = f"{title}: {tokens_per_s:.0f} tokens/s, devices idle {step.idle_share:.0%} of the step"
    return Panel(text, step.devices)


if __name__ == "__main__":
    main()
