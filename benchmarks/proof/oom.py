"""Stage `oom`: a run whose plan was made for more memory than there turns out to be.

Another process takes memory of the card after planning, so the run is out of memory; it must plan
again, once, and end with the losses of a run that nobody disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import records, small_gpt2
from gpumix.schema.plan.plan import Plan
from proof.bench import Bench
from proof.jobs import Command, gpumix, losses, well, worst_difference, write_job
from proof.lines import Bar
from proof.models import SMALL
from proof.outcome import Outcome
from proof.ranks import Ranks, started

STEPS, GLOBAL_BATCH = 6, 64
GIB = 2**30
PLANNED_GIB, LEFT_GIB = 20.0, 8.0
# Of what a plan takes, the most that is left to the run: it is to be out of memory.
LEFT_OF_PLAN = 0.6
# In a rehearsal the run itself holds what somebody else has on a GPU.
REHEARSED_MIB, TAKEN_PART = 6.6, 0.29
LENGTH, REHEARSED_BATCH = 128, 16


def run(bench: Bench) -> Outcome:
    with _others(bench) as others:
        file = _job(bench, "run")
        plan_file = bench.folder / "plan.json"
        well(gpumix(bench, "plan", str(file), "--output", str(plan_file), *_allowed(bench)), "plan")
        before = Plan.model_validate_json(plan_file.read_text())
        well(_trained(bench, _job(bench, "undisturbed"), plan_file), "the undisturbed run")
        truth = losses(bench.folder / "undisturbed")
        taken = _take(bench, others, before)
        done = _trained(bench, _job(bench, "run", disturbed=True), plan_file)
    folder = bench.folder / "run"
    restarts = records(folder, "restart")
    figures = {
        "planned_peak_bytes": _peak_bytes(before),
        "taken_bytes": taken,
        "exit_code": done.code,
        "planned_again": sum(one["why"] == "out of memory" for one in restarts),
        "decided": "; ".join(one.get("decided", "") for one in restarts),
        "plan_before": _in_words(before),
        "plan_after": _in_words(_plan_in(folder)),
        "lost_s": _lost_s(folder),
        "loss_off": worst_difference(losses(folder), truth),
        "said": done.err[-600:],
    }
    bars = (
        Bar("exit_code", 0, 0),
        Bar("planned_again", 1, 1 if bench.place == "gpu" else 3),
        Bar("loss_off", most=1e-3),
        Bar("lost_s", most=20.0, judges="gpu"),
    )
    return Outcome(figures, bars)


def _job(bench: Bench, name: str, *, disturbed: bool = False) -> Path:
    steps = 4 if bench.rehearses else STEPS
    batch = REHEARSED_BATCH if bench.rehearses else GLOBAL_BATCH
    keys: dict[str, Any] = {"global_batch_size": batch, "max_steps": steps}
    keys |= {"memory_save_steps": 1, "advanced": {"rebalance": False}}
    if bench.place == "gpu":
        assert bench.card is not None
        memory_gib = min(PLANNED_GIB, 0.7 * bench.card.memory_bytes / GIB)
        cluster = [{"class": "h100", "memory": f"{memory_gib:.1f} GiB"}]
        # All micro-batches go through a block before the next one: so a plan fills its memory.
        techniques = {"orders": ["layered"], "state_on": ["device"], "checkpoints_on": ["device"]}
        return write_job(bench, name, SMALL, cluster=cluster, techniques=techniques, **keys)
    taken = int(TAKEN_PART * REHEARSED_MIB * 2**20) if disturbed else 0
    arguments = {"folder": str(bench.folder), "length": LENGTH, "rank": 0, "step": 2}
    return write_job(
        bench,
        name,
        SMALL,
        model={"config": small_gpt2(64, positions=LENGTH, layers=2)},
        data={
            "factory": "faulted.hog:samples",
            "arguments": {**arguments, "taken_bytes": taken},
            "validation_split": 0.0,
        },
        sequence_length=LENGTH,
        cluster=[{"class": "small", "accelerator": "cpu", "memory": f"{REHEARSED_MIB} MiB"}],
        techniques={"orders": ["layered"]},
        **keys,
    )


def _allowed(bench: Bench) -> tuple[str, ...]:
    return ("--allow", "faulted") if bench.rehearses else ()


def _trained(bench: Bench, job: Path, plan: Path) -> Any:
    return Command(bench, "train", str(job), "--plan", str(plan), *_allowed(bench)).wait()


@contextmanager
def _others(bench: Bench) -> Iterator[Ranks | None]:
    """Somebody else, who can take memory of the card."""
    if bench.place != "gpu":
        yield None
        return
    with started(bench, [{}]) as ranks:
        yield ranks


def _take(bench: Bench, others: Ranks | None, plan: Plan) -> int:
    """Let the others take all but so much that the plan does not fit; how much they have."""
    if others is None:
        return int(TAKEN_PART * REHEARSED_MIB * 2**20)
    left = min(LEFT_GIB * GIB, LEFT_OF_PLAN * (_peak_bytes(plan) or LEFT_GIB * GIB))
    (told,) = others.all("take", leave_bytes=int(left))
    return int(told["taken_bytes"])


def _peak_bytes(plan: Plan | None) -> int | None:
    if plan is None or plan.prediction is None:
        return None
    return plan.prediction.workers[0].peak_bytes


def _plan_in(run: Path) -> Plan | None:
    file = run / "plan.json"
    return Plan.model_validate_json(file.read_text()) if file.is_file() else None


def _in_words(plan: Plan | None) -> str:
    if plan is None:
        return ""
    (worker, *_), peak = plan.workers, _peak_bytes(plan)
    told = f"{worker.samples} samples in micro-batches of {worker.micro_batch}, "
    told += f"{worker.mode.describe()}, {worker.kept_graphs} graphs kept"
    return told + (f", {peak / GIB:.2f} GiB" if peak else "")


def _lost_s(run: Path) -> float | None:
    """From the failure to the end of the next step, with what is done again."""
    restarts = records(run, "restart")
    if not restarts:
        return None
    failed = restarts[0].get("failed_at", restarts[0]["time"])
    later = [one["time"] for one in records(run, "step") if one["time"] > failed]
    return min(later) - failed if later else None
