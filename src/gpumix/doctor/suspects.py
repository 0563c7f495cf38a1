"""Suspected slowdowns of a job, derived from its settings and a few observed steps. Pure.

A suspect is no finding: `doctor.examine` measures whether its change shortens steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gpumix.cost.input_time import MIN_STARVED_SHARE
from gpumix.doctor.change import Changes, get_default
from gpumix.doctor.function.suspects import (
    LAUNCH_SHARE,
    suspect_fragmentation,
    suspect_waiting_lines,
)
from gpumix.doctor.rank_watch import RankObservations
from gpumix.doctor.report import BATCH_NOTE, DTYPE_NOTE, Suspect
from gpumix.schema.cluster.kernels import EfficiencySpec
from gpumix.schema.job.job import Job
from gpumix.schema.plan.plan import Plan
from gpumix.schema.units import LARGEST_BATCH
from gpumix.train.run_log.interruption_cost import InterruptionCost

LEAST_PREDICTED_SAVING = 0.02  # predicted savings, as fraction of a step, to suspect a pin
MOST_INTERLUDE_SHARE = 0.02  # fraction of a run allowed for evaluations, or for checkpoints
PADDING = 0.05  # fraction of a batch
SMALL_BATCH = 0.15  # predicted savings, as fraction of a step, to suspect a small batch
OTHER_DATA = "checkpoints of the job as it is cannot be gone on from"


@dataclass(frozen=True)
class Evidence:
    """Observations of a few steps of the job, and predictions of plans.

    Attributes:
        input_share: fraction of a step waiting for data, on the device with the longest wait.
        save, evaluation: cost of one checkpoint and of one evaluation; zero if there are none.
        step_s: without `save` and `evaluation`.
        padding_share: fraction of a batch's tokens; None: unknown.
        inside: observations in ranks, over `steps` steps.
        retries: of allocators over these steps.
        kernels_share: fraction of a step in which a GPU computes; None: unknown.
        compilers: whether code can be compiled for GPUs; `cpu_compilers`: for CPU devices.
        cpu_bf16: names of CPU classes with bf16 instructions.
        other_dtypes: whether `precision: auto` would select another dtype for some class.
        tf32: names of classes supporting TF32 for fp32 products.
        planned_s: predicted step time of the job's current plan.
        predict_step_s: plans the job with changes, and returns the predicted step time for the same
            number of samples; None without a plan.
    """

    job: Job
    plan: Plan
    input_share: float
    step_s: float
    save: InterruptionCost
    evaluation: InterruptionCost
    padding_share: float | None
    inside: RankObservations
    steps: int
    retries: int
    kernels_share: float | None
    compilers: bool
    cpu_compilers: bool
    cpu_bf16: tuple[str, ...]
    other_dtypes: bool
    tf32: tuple[str, ...]
    planned_s: float
    predict_step_s: Callable[[Changes], float | None]


PINS = {
    "gradient_checkpointing": "blocks are computed twice",
    "zero_stages": "what of the state is divided is pinned",
    "shardings": "between which GPUs or CPUs the state is divided is pinned",
    "checkpoints_on": "inputs of blocks are kept on the host",
    "orders": "the order of micro-batches is pinned",
    "cross_entropy": "how the head is computed is pinned",
    "state_on": "where the state is kept is pinned",
    "tensor_parallel_size": "how many GPUs or CPUs compute a block together is pinned",
    "sequence_parallel": "whether the sequence is divided is pinned",
    "max_pipeline_stages": "the number of stages is pinned",
    "min_pipeline_stages": "the number of stages is pinned",
    "pipeline_schedules": "the schedule of stages is pinned",
    "padded": "padded collectives are left out",
    "leave_out": "GPUs or CPUs that only hold the others up may not be left out",
}

NAMES = (
    "workers",
    "tokenize",
    "syncs",
    "prints",
    "retries",
    "strategy",
    *PINS,
    "precision",
    "bf16",
    *EfficiencySpec.model_fields,
    "eager",
    "launches",
    "compile",
    "padding",
    "checkpoints",
    "evaluation",
    "batch",
)
"""Names of all suspects."""


def find_suspects(seen: Evidence) -> list[Suspect]:
    """Return suspects in the order of testing: input first, because waits for data hide all
    else."""
    return [
        *_input(seen),
        *suspect_waiting_lines(
            seen.inside.syncs, seen.inside.writes, seen.steps, seen.steps * seen.step_s
        ),
        *suspect_fragmentation(seen.retries, seen.steps),
        *_pins(seen),
        *_suspect_computation(seen),
        *_padding(seen),
        *_suspect_interludes(seen),
        *_batch(seen),
    ]


def _input(seen: Evidence) -> Iterator[Suspect]:
    if seen.input_share <= MIN_STARVED_SHARE:
        return
    data = seen.job.data
    why = f"training waits for its data in {seen.input_share:.0%} of a step"
    pinned = {
        f"data.{key}": "auto" for key in ("num_workers", "prefetch") if getattr(data, key) != "auto"
    }
    if pinned:
        yield Suspect("workers", "too few workers, or batches ahead", why, pinned)
    if data.tokenize == "on-the-fly" and data.factory is None:  # only the factory knows its texts
        yield Suspect(
            name="tokenize",
            what="texts are tokenised again in each epoch",
            why=why,
            changes={"data.tokenize": "ahead"},
            note=f"token files take room on the disk; {OTHER_DATA}",
        )


def _pins(seen: Evidence) -> Iterator[Suspect]:
    """Suspect pinned techniques where the planner would choose differently."""
    if seen.job.strategy != "optimal":
        changes: dict[str, Any] = {"strategy": "optimal"}
        yield from _suspect_if_predicted(
            seen, "strategy", f"`strategy: {seen.job.strategy}`", changes
        )
    said = seen.job.techniques.model_dump(mode="json")
    for key, what in PINS.items():
        if said[key] != (default := get_default(f"techniques.{key}")):
            yield from _suspect_if_predicted(seen, key, what, {f"techniques.{key}": default})


def _suspect_if_predicted(
    seen: Evidence, name: str, what: str, changes: Changes
) -> Iterator[Suspect]:
    predicted_s = seen.predict_step_s(changes)
    if predicted_s is None or predicted_s >= seen.planned_s * (1.0 - LEAST_PREDICTED_SAVING):
        return
    gain = seen.planned_s / predicted_s
    yield Suspect(name, what, f"the cost model promises {gain:.2f}x the speed", changes)


def _suspect_computation(seen: Evidence) -> Iterator[Suspect]:
    """Suspect settings of computation not left to each class."""
    job = seen.job
    if seen.other_dtypes:
        why = "each class has a dtype that it is fastest in"
        what, changes = f"`precision: {job.precision}`", {"precision": "auto"}
        yield Suspect("precision", what, why, changes, note=DTYPE_NOTE)
    for key, value in job.advanced.efficiency.model_dump(mode="json").items():
        if value != "auto":
            what = f"`advanced.efficiency.{key}: {value}`"
            why = "what a class does best is known"
            yield Suspect(key, what, why, {f"advanced.efficiency.{key}": "auto"})
    if isinstance(job.model.config, dict) and _has_eager_attention(job.model.config):
        why = "a fused kernel makes no matrix of all pairs of positions"
        changes = {"advanced.efficiency.attention": "sdpa"}
        yield Suspect("eager", "the model's `config` asks for attention `eager`", why, changes)
    if job.precision == "fp32" and job.advanced.efficiency.tf32 == "auto" and seen.tf32:
        why = "tensor cores compute fp32 products in TF32, which keeps 10 of 23 bits"
        by_class = dict.fromkeys(seen.tf32, True)
        yield Suspect("tf32", "TF32 is off", why, {"advanced.efficiency.tf32": by_class})
    if job.precision == "auto" and seen.cpu_bf16:
        yield Suspect(
            name="bf16",
            what="a CPU computes in fp32",
            why="it has instructions for bf16, which has as large a range",
            changes={"precision": dict.fromkeys(seen.cpu_bf16, "bf16")},
            note=DTYPE_NOTE,
            changes_training=True,
        )
    yield from _compiled(seen)


def _compiled(seen: Evidence) -> Iterator[Suspect]:
    if seen.job.torch_compile is not False or not (seen.compilers or seen.cpu_compilers):
        return
    name, what = "compile", "blocks are not compiled"
    why = "compiled code fuses what lies between products"
    if seen.kernels_share is not None and seen.kernels_share < LAUNCH_SHARE:
        name, what = "launches", "a GPU waits for its next kernel: kernels are small"
        why = f"it computes in {seen.kernels_share:.0%} of a step"
    yield Suspect(name, what, why, {"torch_compile": True}, costly=not seen.compilers)


def _has_eager_attention(config: dict[str, Any]) -> bool:
    return "eager" in (config.get("_attn_implementation"), config.get("attn_implementation"))


def _padding(seen: Evidence) -> Iterator[Suspect]:
    data = seen.job.data
    if seen.padding_share is None or seen.padding_share <= PADDING:
        return
    if data.packing == "none" and not data.bucketing:
        why = f"{seen.padding_share:.0%} of a batch are padding"
        yield Suspect(
            name="padding",
            what="samples of unlike length meet in a batch",
            why=why,
            changes={"data.bucketing": True},
            note=f"samples come in another order; {OTHER_DATA}",
            changes_training=True,
        )


def _suspect_interludes(seen: Evidence) -> Iterator[Suspect]:
    """Suspect evaluations and checkpoints running too often."""
    for name, key, took, what, given_up in (
        (
            "checkpoints",
            "save_steps",
            seen.save,
            "checkpoints are saved too often",
            "what is on the disk is up to {} steps old, {} as it is",
        ),
        (
            "evaluation",
            "eval_steps",
            seen.evaluation,
            "it is evaluated too often",
            "the loss of evaluation is known every {} steps, every {} as it is",
        ),
    ):
        stated = getattr(seen.job, key)
        every = 0 if stated == "auto" else stated
        each_s = took.compute_added_s(every * seen.step_s)
        if not every or each_s <= MOST_INTERLUDE_SHARE * every * seen.step_s:
            continue
        share = each_s / (each_s + every * seen.step_s)
        wanted_s = max((took.pause_s + took.slowdown_s) / MOST_INTERLUDE_SHARE, took.overlapped_s)
        rarer = max(every, round(wanted_s / seen.step_s))
        yield Suspect(
            name=name,
            what=what,
            why=f"that is {share:.0%} of the run",
            changes={key: rarer},
            note=given_up.format(rarer, every),
        )


def _batch(seen: Evidence) -> Iterator[Suspect]:
    """Suspect a small batch last, because it changes training, and only without waits for data."""
    changes = {"global_batch_size": 2 * seen.job.global_batch_size}
    if seen.input_share > MIN_STARVED_SHARE or changes["global_batch_size"] > LARGEST_BATCH:
        return
    predicted_s = seen.predict_step_s(changes)
    if predicted_s is None or predicted_s >= seen.planned_s * (1.0 - SMALL_BATCH):
        return
    yield Suspect(
        name="batch",
        what="batches are small",
        why=f"the cost model promises {seen.planned_s / predicted_s:.2f}x the samples a second",
        changes=changes,
        note=BATCH_NOTE,
        changes_training=True,
    )
