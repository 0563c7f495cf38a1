"""Stage `cli`: what a user types first, and what is to be seen of a run afterwards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from common import records
from gpumix.cli.verbs.demo import GPT
from proof.bench import Bench
from proof.jobs import gpumix, losses, well, write_job
from proof.lines import Bar, is_true
from proof.models import REHEARSED, SMALL
from proof.outcome import Outcome

STEPS, TRACED = 30, 20
GIB = 2**30
FALL_NATS = 1.0


def run(bench: Bench) -> Outcome:
    found = dict(bench.measured("devices", lambda: (_devices(bench), ())))
    found |= bench.measured("train", lambda: (_train(bench), ()))
    found |= bench.measured("report", lambda: (_report(bench), ()))
    bars = (
        is_true("is_the_card", judges="gpu"),
        Bar("exit_code", 0, 0),
        Bar("fall_nats", least=FALL_NATS, judges="gpu"),
        Bar("evaluations", 2, 2),
        Bar("units_without_span", most=0),
        Bar("negative_spans", most=0),
        Bar("spans_over_step", least=0.99, most=1.01, judges="gpu"),
        is_true("report_made"),
    )
    return Outcome(found, bars)


def _devices(bench: Bench) -> dict[str, Any]:
    told = well(gpumix(bench, "devices", "--json"), "gpumix devices").json
    (of_class,) = told["classes"]
    name = bench.card.name if bench.card is not None else ""
    return {
        "product": of_class["product"],
        "memory_gib": round(of_class["memory_bytes"] / GIB, 1),
        "devices": len(told["devices"]),
        "is_the_card": of_class["accelerator"] == "cuda" and of_class["product"] == name,
    }


def _train(bench: Bench) -> dict[str, Any]:
    """The demo's model and text, on the device that is found."""
    steps, traced = (6, 4) if bench.rehearses else (STEPS, TRACED)
    keys: dict[str, Any] = {"model": {"config": GPT}, "sequence_length": 128}
    if bench.rehearses:
        keys = {}
    job = write_job(
        bench,
        "run",
        REHEARSED if bench.rehearses else SMALL,
        global_batch_size=8 if bench.rehearses else 32,
        max_steps=steps,
        advanced={"trace_step": traced},
        optimizer={"lr": 1e-3},
        lr_scheduler={"warmup_steps": 6},
        eval_steps=steps // 2,
        eval_batches=1,
        memory_save_steps=0,
        **keys,
    )
    told = yaml_with(job, data={"validation_split": 0.05})
    done = well(gpumix(bench, "train", str(told), "--json"), "gpumix train")
    by_step = losses(bench.folder / "run")
    (step_s,) = (
        one["step_s"] for one in records(bench.folder / "run", "step") if one["step"] == traced
    )
    return {
        "exit_code": done.code,
        "first_loss": by_step[1],
        "last_loss": by_step[max(by_step)],
        "fall_nats": by_step[1] - by_step[max(by_step)],
        "evaluations": len(records(bench.folder / "run", "evaluation")),
        "tokens_per_s": done.json["tokens_per_s"],
        **_trace(bench.folder / "run", step_s, layers=2 if bench.rehearses else GPT["n_layer"]),
    }


def yaml_with(job: Path, **parts: dict[str, Any]) -> Path:
    """The job with further keys inside of keys that it has."""
    import yaml

    told = yaml.safe_load(job.read_text())
    for name, more in parts.items():
        told[name] = {**told[name], **more}
    job.write_text(yaml.safe_dump(told, sort_keys=False))
    return job


def _trace(run: Path, step_s: float, *, layers: Any) -> dict[str, Any]:
    """Whether the trace has a span for each unit's forward and backward, and all of the step."""
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    spans = [one for one in events if one["ph"] == "X"]
    blocks = [one for one in spans if one["args"].get("unit") not in (None, "(root)")]
    by_kind = {k: {one["args"]["unit"] for one in blocks if one["cat"] == k} for k in KINDS}
    total_s = math.fsum(one["dur"] for one in spans) / 1e6
    return {
        "spans": len(spans),
        "units_without_span": sum(int(layers) - len(units) for units in by_kind.values()),
        "negative_spans": sum(one["dur"] < 0 or one["ts"] < 0 for one in spans),
        "spans_over_step": total_s / step_s,
    }


KINDS = ("forward", "backward")


def _report(bench: Bench) -> dict[str, Any]:
    well(gpumix(bench, "report", str(bench.folder / "run")), "gpumix report")
    file = bench.folder / "run" / "report.html"
    return {"report_made": file.is_file() and file.stat().st_size > 10_000}
