"""Tiny jobs for tests of the train loop, the profiler and the command line, and ways to run them.

In the test's own process (`train`), where ranks start in a tenth of a second; or as a user does, in
a process of its own (`gpumix`), where exit codes, stderr and signals matter.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import toys
import yaml

from gpumix.engine.model.deferred_init import build
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.job.advanced import AdvancedSpec
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, Mode, Stage, Worker
from gpumix.schema.reading.read import read_job
from gpumix.train.controller import JobController, UserPlan
from gpumix.train.rank_setup.model import build_model
from gpumix.train.run_log.summary import Summary
from helpers.paths import TESTS, USER_CODE
from helpers.processes import commands
from helpers.processes.commands import Done

LENGTH = 8
BATCH = 8

# Techniques with few plans, which are found soon.
FEW_PLANS = {
    "max_pipeline_stages": 1,
    "tensor_parallel_size": 1,
    "zero_stages": 3,
    "leave_out": False,
}
# What is measured once serves all tests that do not look at how it is; those have a cache of their
# own, beside their job.
SHARED_PROFILES = "GPUMIX_TEST_PROFILES"
OWN_PROFILES = {"profile_cache": "profiles", "profile_budget": 20}

# A real CPU class is not slowed down; memory is counted and capped as on any device.
CLUSTER = [
    {"class": "big", "accelerator": "cpu", "memory": "64 MiB"},
    {"class": "small", "accelerator": "cpu", "memory": "32 MiB", "count": 2},
]
# How blocks of toys are divided.
TENSOR_PLAN = {"blocks.*.into": "colwise", "blocks.*.out": "rowwise"}
PAIR = [{"class": "pair", "accelerator": "cpu", "memory": "64 MiB", "count": 2}]
EMULATED = [
    {"class": "fast", "emulate": "50 GFLOP/s", "memory": "64 MiB"},
    {"class": "slow", "emulate": "25 GFLOP/s", "memory": "32 MiB", "count": 2},
]


def write_job(folder: Path, **changes: Any) -> Path:
    """A job file in `folder`; `changes` replace top-level keys, or keys of `advanced`. None removes
    one, except `max_grad_norm`, where it is a value."""
    job: dict[str, Any] = {
        "model": {"factory": "toys:model"},
        "data": {"factory": "toys:tokens", "validation_split": 0.1},
        "sequence_length": LENGTH,
        "global_batch_size": BATCH,
        "max_steps": 6,
        "optimizer": {"lr": 1e-2},
        "cluster": CLUSTER,
        "output_dir": "run",
        "logging_steps": 2,
        "techniques": {"max_pipeline_stages": 1, "leave_out": False},  # what is faster is measured
    }
    advanced: dict[str, Any] = {
        "profile_cache": os.environ.get(SHARED_PROFILES, "profiles"),
        "profile_budget": 20,
        "timeout": 30,
        "max_restarts": 0,
        "rebalance": False,  # by measured times, and so the same sums would not come in each run
    }
    for key, value in changes.items():
        (advanced if key in AdvancedSpec.model_fields else job)[key] = value
    for keys in (job, advanced):
        for key in [k for k, value in keys.items() if value is None and k != "max_grad_norm"]:
            del keys[key]
    job["advanced"] = advanced
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return path


def toy(**arguments: Any) -> dict[str, Any]:
    """The `model` key of a job whose toy model takes these arguments."""
    return {"factory": "toys:model", "arguments": arguments}


def plan_for(
    job_file: Path, samples: Sequence[int] = (4, 2, 2), shares: Sequence[float] = (0.5, 0.25, 0.25)
) -> Plan:
    """A plan by hand for the model of a job, its devices in rank order; one micro-batch each.

    It holds no prediction, so nothing is profiled and nothing refused before it runs.
    """
    job = read_job(job_file)
    assert isinstance(job.cluster, Cluster)
    if job.model.config is None and job.model.lora is None:
        model = build(lambda: toys.model(**job.model.arguments), seed=0)
    else:
        model = build_model(job.model, folder=job_file.parent, seed=0)
    anatomy = split_into_units(model)
    workers = tuple(
        Worker(
            device=device.id,
            device_class=device.device_class,
            host=device.host,
            samples=count,
            micro_batch=count,
            state_share=share,
        )
        for device, count, share in zip(job.cluster.in_rank_order(), samples, shares, strict=True)
    )
    return Plan(
        strategy="by hand",
        model=anatomy.fingerprint(),
        sequence_length=job.sequence_length,
        global_batch=sum(samples),
        stages=(Stage(units=tuple(u.name for u in anatomy.units), workers=workers),),
    )


def staged_plan_for(
    job_file: Path,
    samples: Sequence[Sequence[int]],
    *,
    micro_batch: int = 2,
    tensor: Sequence[int] = (),
    mode: Mode = PLAIN,
    **settings: Any,
) -> Plan:
    """A plan by hand of several stages, by the samples of each tensor-parallel group of each stage,
    devices in rank order, and again from the first one; of equally many unit calls, by what the
    profile says of the model. `tensor` has the degree of each stage, by default 1."""
    pipeline = JobController.of_file(job_file, [], debug=True)
    profile = pipeline.profile()
    model, devices = profile.model, cycle(pipeline.cluster.in_rank_order())
    stages = []
    for number, (counts, size) in enumerate(zip(samples, tensor or [1] * len(samples))):
        begin, end = (len(model.calls) * n // len(samples) for n in (number, number + 1))
        needs = model.needs_of(begin, end)
        workers = tuple(
            Worker(
                device=device.id,
                device_class=device.device_class,
                samples=count,
                micro_batch=min(count, micro_batch),
                state_share=1 / len(counts),
                mode=mode,
            )
            for count in counts
            for device in islice(devices, size)
        )
        stages.append(
            Stage(
                units=model.calls[begin:end],
                workers=workers,
                tensor=size,
                root=needs.root,
                takes=needs.outputs,
            )
        )
    return Plan(
        strategy="by hand",
        model=model.fingerprint,
        sequence_length=profile.sequence_length,
        global_batch=sum(samples[0]),
        stages=tuple(stages),
        **settings,
    )


def plan_of_mixed_degrees(job_file: Path) -> Plan:
    """A plan by hand for a device, which computes both parts of units, and `PAIR`, which divides
    them. It names another order of ranks than the cluster has, which is the one that counts."""
    plan = plan_for(job_file, samples=(5, 3, 0), shares=(0.6, 0.4, 0.0))
    (stage,) = plan.stages
    big, one, other = stage.workers
    part = {"samples": 3, "micro_batch": 2, "state_share": 0.4}
    big = big.model_copy(update={"parts": 2, "micro_batch": 2})
    tp_group = tuple(worker.model_copy(update=part) for worker in (one, other))
    changed = stage.model_copy(update={"tensor": 2, "workers": (big, *tp_group)})
    ranks = (one.device, big.device, other.device)
    dumped = plan.model_copy(update={"stages": (changed,), "ranks": ranks}).model_dump_json()
    return Plan.model_validate_json(dumped)


# -- in this process -------------------------------------------------------------------------------


def train(
    job_file: Path, *overrides: str, plan: Plan | None = None, resume: bool = False
) -> Summary:
    """`gpumix train` by `plan`, or by one that is made."""
    return JobController.of_file(job_file, overrides, debug=False).train(
        UserPlan(plan), resume=resume
    )


# -- as a user -------------------------------------------------------------------------------------


def gpumix(
    *arguments: str | Path,
    folder: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 90,
    fresh: bool = False,
) -> Done:
    """Run the command line in `folder`; no process of it is left afterwards. `fresh`: see
    `commands.run`."""
    words = [sys.executable, "-m", "gpumix", *arguments]
    return run(words, folder, env or {}, timeout_s, fresh=fresh)


def run(
    command: Sequence[str | Path],
    folder: Path,
    env: Mapping[str, str],
    timeout_s: float,
    *,
    fresh: bool = False,
) -> Done:
    """Run any command in `folder`, with `env` beside `environment`."""
    env = environment(folder) | env
    return commands.run(command, folder=folder, env=env, timeout_s=timeout_s, fresh=fresh)


def environment(folder: Path) -> dict[str, str]:
    """The toys can be imported, and what else could be."""
    paths = [str(TESTS), str(USER_CODE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return commands.environment(folder / "cache") | {"PYTHONPATH": os.pathsep.join(paths)}


# -- what a run leaves -----------------------------------------------------------------------------


def metrics(run_folder: Path, event: str = "step") -> list[dict[str, Any]]:
    """The records of one kind in a run's metrics.jsonl; every line is JSON as others read it."""
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line, parse_constant=_no_json) for line in lines]
    return [record for record in records if record["event"] == event]


def progress(run_folder: Path) -> dict[str, Any]:
    text = (run_folder / "progress.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text, parse_constant=_no_json)
    return found


def checkpoints(run_folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder / "checkpoints").iterdir())


def _no_json(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
