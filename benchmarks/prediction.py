"""How well the cost model foretells step time and peak memory.

Profiles two small models on four emulated devices of three classes, then runs random plans (uneven
samples, micro-batches and shares, among them devices without samples or without state) for a few
steps each, next to `optimal` and `even`, and compares with what was predicted beforehand.

    python benchmarks/prediction.py [--json] [--plans 5] [--steps 4]

Figures: `plans`, `step_time_mape` and `memory_mape` (mean absolute error over plans, and over all
devices of all plans, as fractions), `worst_memory_underestimate` (the largest fraction by which a
measured peak was above the predicted one; 0 if none was), `overruns` (must be 0 to count).
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import yaml

from gpumix.cost.predict import predict
from gpumix.spec.plan import Plan, Stage, Worker
from gpumix.spec.profile import Profile
from gpumix.train.pipeline import Pipeline

TRIES = 3
SEED = 11
SHARE_STEPS = 20
SLOWEST = 2.0
TEXT = Path(sysconfig.get_path("stdlib")) / "asyncio"  # real text that every Python has

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


def main() -> None:
    arguments = _arguments()
    rows: list[dict[str, Any]] = []
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            pipeline = Pipeline.of_file(_job(Path(folder), config), [], debug=True)
            profile = pipeline.profile(fresh=True)
            for label, plan in _plans(pipeline, profile, arguments.plans):
                rows.append(_row(f"{name} {label}", pipeline, plan, arguments.steps))
                print(_line(rows[-1]), flush=True)
    times = [abs(r["predicted_s"] / r["measured_s"] - 1) for r in rows]
    memory = [p / m - 1 for r in rows for p, m in zip(r["predicted_bytes"], r["measured_bytes"])]
    print(json.dumps({
        "plans": len(rows),
        "step_time_mape": sum(times) / len(times),
        "worst_step_time_error": max(times),
        "memory_mape": sum(map(abs, memory)) / len(memory),
        "worst_memory_overestimate": max(0.0, *memory),
        "worst_memory_underestimate": max(0.0, *(-e for e in memory)),
        "overruns": sum(r["overruns"] for r in rows),
    }) if arguments.json else f"step time {sum(times) / len(times):.1%}, memory "
        f"{sum(map(abs, memory)) / len(memory):.1%}, worst under-estimate "
        f"{max(0.0, *(-e for e in memory)):.1%} over {len(rows)} plans")  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plans", type=int, default=5, help="random plans per model")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per plan")
    return parser.parse_args()


def _job(folder: Path, config: dict[str, Any]) -> Path:
    job = {
        "model": {"config": config},
        "data": {"text": [str(TEXT)], "pattern": "*.py"},
        "sequence_length": 64,
        "global_batch": 16,
        "steps": 1000,
        "cluster": CLUSTER,
        "output": str(folder / "run"),
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def _plans(pipeline: Pipeline, profile: Profile, wanted: int) -> list[tuple[str, Plan]]:
    """`optimal`, `even`, and random ones that the cost model says fit."""
    optimal = pipeline.plan(profile)
    found = [("optimal", optimal), ("even", pipeline.plan(profile, "even"))]
    rng = random.Random(SEED)
    while len(found) < wanted + 2:
        plan = _random_plan(rng, optimal)
        prediction = predict(profile, plan)
        # Slower plans tell nothing more, they only take longer to measure.
        assert optimal.prediction is not None
        slow = prediction.step_s > SLOWEST * optimal.prediction.step_s
        if not slow and all(w.peak_bytes <= w.memory_limit_bytes for w in prediction.workers):
            plan = plan.model_copy(update={"prediction": prediction})
            found.append((f"random {len(found) - 1}", plan))
    return found


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


def _row(label: str, pipeline: Pipeline, plan: Plan, steps: int) -> dict[str, Any]:
    """Measure a plan; once more where an emulated device fell behind its speed."""
    for _ in range(TRIES):
        trial = pipeline.try_out(plan, steps)
        if trial.overruns == 0:
            break
    assert plan.prediction is not None
    if None in trial.peak_bytes:
        raise SystemExit("this machine cannot count memory: install a C++ compiler (g++)")
    return {
        "label": label,
        "predicted_s": plan.prediction.step_s,
        "measured_s": trial.step_s,
        "predicted_bytes": [w.peak_bytes for w in plan.prediction.workers],
        "measured_bytes": trial.peak_bytes,
        "overruns": trial.overruns,
    }


def _line(row: dict[str, Any]) -> str:
    error = row["predicted_s"] / row["measured_s"] - 1
    memory = " ".join(
        f"{p / m - 1:+.1%}" for p, m in zip(row["predicted_bytes"], row["measured_bytes"])
    )
    return (
        f"{row['label']:<18} {row['measured_s'] * 1e3:7.0f} ms a step, predicted {error:+.1%}; "
        f"memory by rank {memory}; overruns {row['overruns']}"
    )


if __name__ == "__main__":
    main()
