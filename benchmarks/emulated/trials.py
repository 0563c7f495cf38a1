"""Random plans for emulated devices, foretold and measured."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common import TEXT
from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import get_prediction
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import Profile
from gpumix.train.controller import JobController

TRIES = 3
SHARE_STEPS = 20

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "n_embd": 192, "n_layer": 4, "n_head": 6, "n_positions": 64,
        "vocab_size": 264, "bos_token_id": 256, "eos_token_id": 256,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 160, "intermediate_size": 432,
        "num_hidden_layers": 5, "num_attention_heads": 5, "num_key_value_heads": 5,
        "vocab_size": 264, "bos_token_id": 256, "eos_token_id": 256,
    },
}  # fmt: skip
CLUSTER = [
    {"class": "fast", "emulate": "8 GFLOP/s", "memory": "256 MiB"},
    {"class": "medium", "emulate": "4 GFLOP/s", "memory": "256 MiB"},
    {"class": "slow", "emulate": "2 GFLOP/s", "memory": "256 MiB", "count": 2},
]


@dataclass(frozen=True)
class Outcome:
    """One plan: what was predicted beforehand, and what it took."""

    label: str
    predicted_s: float
    measured_s: float
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    overruns: int

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_errors(self) -> tuple[float, ...]:
        return tuple(p / m - 1 for p, m in zip(self.predicted_bytes, self.measured_bytes))

    def __str__(self) -> str:
        memory = " ".join(f"{error:+.1%}" for error in self.memory_errors)
        return (
            f"{self.label:<18} {self.measured_s * 1e3:7.0f} ms a step, predicted "
            f"{self.time_error:+.1%}; memory by rank {memory}; overruns {self.overruns}"
        )


@contextmanager
def profiled(
    model: str, *, global_batch: int = 16, sequence_length: int = 64
) -> Iterator[tuple[JobController, Profile]]:
    """A job with this model, and its fresh profile."""
    with tempfile.TemporaryDirectory() as folder:
        path = _job(Path(folder), MODELS[model], global_batch, sequence_length)
        pipeline = JobController.of_file(path, [], debug=True)
        yield pipeline, pipeline.profile(fresh=True)


def random_plans(
    profile: Profile, optimal: Plan, wanted: int, *, seed: int, slowest: float
) -> Iterator[Plan]:
    """Plans that the cost model says fit, and take at most `slowest` times the optimal step: slower
    ones tell nothing more, they only take longer to measure."""
    rng, found = random.Random(seed), 0
    while found < wanted:
        plan = _random_plan(rng, optimal)
        prediction = predict(profile, plan)
        slow = prediction.step_s > slowest * get_prediction(optimal).step_s
        if not slow and all(w.peak_bytes <= w.memory_limit_bytes for w in prediction.workers):
            found += 1
            yield plan.model_copy(update={"prediction": prediction})


def measured(label: str, pipeline: JobController, plan: Plan, steps: int) -> Outcome:
    """Measure a plan; once more where an emulated device fell behind its speed."""
    for _ in range(TRIES):
        trial = pipeline.try_out(plan, steps)
        if trial.overruns == 0:
            break
    peaks = tuple(peak for peak in trial.peak_bytes if peak is not None)
    if len(peaks) < len(trial.peak_bytes):
        raise SystemExit("this machine cannot count memory: install a C++ compiler (g++)")
    return Outcome(
        label=label,
        predicted_s=get_prediction(plan).step_s,
        measured_s=trial.step_s,
        predicted_bytes=tuple(w.peak_bytes for w in get_prediction(plan).workers),
        measured_bytes=peaks,
        overruns=trial.overruns,
    )


def _job(folder: Path, config: dict[str, Any], global_batch: int, sequence_length: int) -> Path:
    job = {
        "model": {"config": config},
        "data": {"text": [str(TEXT)], "pattern": "*.py"},
        "sequence_length": sequence_length,
        "global_batch_size": global_batch,
        "max_steps": 1000,
        "cluster": CLUSTER,
        "output_dir": str(folder / "run"),
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def _random_plan(rng: random.Random, like: Plan) -> Plan:
    cuts = sorted(rng.randint(0, like.global_batch) for _ in like.workers[1:])
    samples = [b - a for a, b in zip([0, *cuts], [*cuts, like.global_batch])]
    parts = [rng.randint(0, SHARE_STEPS) for _ in like.workers]
    parts[rng.randrange(len(parts))] += 1
    workers = [
        Worker(
            device=w.device, device_class=w.device_class, host=w.host, samples=n,
            micro_batch=rng.randint(1, n) if n else 0, state_share=part / sum(parts),
        )
        for w, n, part in zip(like.workers, samples, parts)
    ]  # fmt: skip
    stage = Stage(units=like.stages[0].units, workers=tuple(workers))
    return like.model_copy(update={"stages": (stage,), "strategy": "random"})
