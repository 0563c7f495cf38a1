"""A run that changes its hardware half-way is the run that did not.

Trains 20 steps on four emulated devices; and 10 steps there, then 10 more on two devices of other
classes under another plan. Compares the losses of every step, and which samples each step used.

    python benchmarks/resume.py [--json]

Figures: `worst_relative_error` of a step's loss, `samples_lost` and `samples_repeated` against the
undisturbed run, `same_order` (every step used the same samples in the same order).
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from common import TEXT, emulated_cluster, make_parser, small_gpt2
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.train.controller import JobController
from gpumix.train.processes.local_launcher import RankAddress, launch
from gpumix.train.processes.runner import LocalRunner
from gpumix.train.rank_setup.context import Task, join_run
from gpumix.train.trainer_builder import build_trainer

STEPS = 20
HALF = 10
BATCH = 16
MEMORY_BYTES = 2**29  # of each device

GPT = small_gpt2(96, positions=64)


def main() -> None:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        four = emulated_cluster(
            {"fast": (1, 40e9), "medium": (1, 20e9), "slow": (2, 10e9)}, memory_bytes=MEMORY_BYTES
        )
        two = emulated_cluster({"other": (1, 30e9), "old": (1, 15e9)}, memory_bytes=MEMORY_BYTES)
        job = _job(folder / "whole")
        pipeline = JobController(job.model_copy(update={"cluster": four}), folder, LocalRunner())
        like = pipeline.plan(pipeline.profile())
        first = _plan(like, four, samples=(9, 4, 2, 1), micro=(4, 4, 2, 1), shares=(1, 0, 5, 2))
        second = _plan(like, two, samples=(5, 11), micro=(2, 11), shares=(7, 3))
        whole = _run(job, folder, four, first, steps=STEPS, resume=False)
        halves = _job(folder / "halves")
        before = _run(halves, folder, four, first, steps=HALF, resume=False)
        after = _run(halves, folder, two, second, steps=STEPS - HALF, resume=True)
    losses = before["losses"] + after["losses"]
    samples = before["samples"] + after["samples"]
    used, expected = Counter(chain(*samples)), Counter(chain(*whole["samples"]))
    figures = {
        "worst_relative_error": max(abs(a / b - 1) for a, b in zip(losses, whole["losses"])),
        "samples_lost": (expected - used).total(),
        "samples_repeated": (used - expected).total(),
        "same_order": samples == whole["samples"],
        "steps": len(losses),
    }
    for step, (a, b) in enumerate(zip(whole["losses"], losses), start=1):
        print(f"step {step:2}  undisturbed {a:.6f}  resumed elsewhere {b:.6f}")
    print(json.dumps(figures) if arguments.json else figures)


def traced(
    seat: RankAddress, task: Task, plan: Plan, devices: tuple[Device, ...], steps: int, resume: bool
) -> dict[str, Any]:
    """Some steps and a checkpoint, in one rank: losses, and this rank's samples of each step."""
    with join_run(seat, task) as context:
        own = plan.for_devices([d.id for d in devices])
        trainer = build_trainer(context, own, resume=resume)
        losses, samples = [], []
        with trainer.loader:
            for _ in range(steps):
                losses.append(trainer.train_step().loss)
                samples.append(trainer.loader.last_indices.tolist())
            trainer.save()
        return {"losses": losses, "samples": samples}


def _run(
    job: Job, folder: Path, cluster: Cluster, plan: Plan, *, steps: int, resume: bool
) -> dict[str, Any]:
    devices = cluster.in_rank_order()
    task = Task(job, cluster, folder)
    by_rank = launch(traced, devices, task, plan, devices, steps, resume)
    return {
        "losses": by_rank[0]["losses"],
        "samples": [list(chain(*parts)) for parts in zip(*(r["samples"] for r in by_rank))],
    }


def _job(output: Path) -> Job:
    return Job(
        model=ModelSpec(config=GPT),
        data=DataSpec(text=(TEXT,), pattern="*.py"),
        sequence_length=64,
        global_batch_size=BATCH,
        max_steps=STEPS,
        optimizer=OptimizerSpec(lr=2e-3),
        save_total_limit=1,
        output_dir=output,
    )


def _plan(
    like: Plan,
    cluster: Cluster,
    *,
    samples: tuple[int, ...],
    micro: tuple[int, ...],
    shares: tuple[int, ...],
) -> Plan:
    workers = tuple(
        Worker(
            device=d.id, device_class=d.device_class, samples=n, micro_batch=m,
            state_share=share / sum(shares),
        )
        for d, n, m, share in zip(cluster.in_rank_order(), samples, micro, shares)
    )  # fmt: skip
    stage = Stage(units=like.stages[0].units, workers=workers)
    return like.model_copy(update={"stages": (stage,), "strategy": "by hand", "prediction": None})


if __name__ == "__main__":
    main()
