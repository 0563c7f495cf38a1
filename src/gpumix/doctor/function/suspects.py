"""Suspected slowdowns of a function, derived from its observed steps, with the code edit fixing
each. Pure.

Only observed problems are suspected, since each suspect costs windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from gpumix.cost.input_time import MIN_STARVED_SHARE
from gpumix.doctor.function.loader_suspects import suspect_loaders
from gpumix.doctor.function.observations import (
    Observations,
    OptimizerObservation,
    Site,
)
from gpumix.doctor.report import BATCH_NOTE, DTYPE_NOTE, STATE_NOTE, Suspect
from gpumix.schema.units import format_count

COPY_SHARE = 0.01  # fraction of a step allowed for blocking copies
WRITE_SHARE = 0.01  # fraction of a step allowed for printing
OPTIMIZER_SHARE = 0.03  # fraction of a step above which a faster optimizer is worth a try
REMADE_SHARE = 0.9  # optimizers made per step for the same parameters above which they are remade
SMALL_SHARE = 0.25  # fraction of a step above which the optimizer suggests small batches
ROOMY_MEMORY_SHARE = 0.3  # fraction of the memory in use below which there is room for more
LAUNCH_SHARE = 0.7  # part of a step with GPU computation below which kernel launches limit the GPU
AMPERE, VOLTA = 8, 7  # bf16 and TF32 need Ampere, Triton needs Volta
SITES = 3  # lines named in a message
DELAYABLE_READS = ("item", "tolist", "cpu", "__float__")  # reads allowed to be one step late


NAMES = (
    "workers",
    "copies",
    "syncs",
    "prints",
    "anomaly",
    "deterministic",
    "threads",
    "retries",
    "recompute",
    "attention",
    "tf32",
    "bf16",
    "fp64",
    "fused_optimizer",
    "remade_optimizer",
    "launches",
    "compile",
    "batch",
)
"""Names of all suspects."""


def find_suspects(seen: Observations, kernels_share: float | None = None) -> list[Suspect]:
    """Return suspects in the order of testing: input first, because waits for data hide all else,
    and changes beyond rounding last.

    Args:
        kernels_share: fraction of a step in which a GPU computes; None: unknown.
    """
    return [
        *suspect_loaders(seen),
        *_waits(seen),
        *_settings(seen),
        *_computing(seen),
        *_double_precision(seen),
        *_remade_optimizers(seen),
        *_launches(seen, kernels_share),
        *_batches(seen, kernels_share),
    ]


def _waits(seen: Observations) -> Iterator[Suspect]:
    copying_s = sum(site.seconds for site in seen.copies)
    if seen.share_of(copying_s) > COPY_SHARE:
        yield Suspect(
            name="copies",
            what="copies to the GPU block",
            why=f"they take {seen.share_of(copying_s):.0%} of a step",
            changes={"pinned": True},
            fix="DataLoader(..., pin_memory=True), and .to(device, non_blocking=True) at "
            + _places(seen.copies),
        )
    yield from suspect_waiting_lines(seen.syncs, seen.writes, seen.steps, seen.seconds)


def suspect_waiting_lines(
    syncs: tuple[Site, ...], writes: tuple[Site, ...], steps: int, seconds: float
) -> Iterator[Suspect]:
    """Suspect lines making the host wait, observed in `steps` steps of `seconds` in total."""
    late = [site for site in syncs if site.what in DELAYABLE_READS]
    if sum(site.calls for site in late) >= steps:
        a_step = sum(site.calls for site in late) / steps
        yield Suspect(
            name="syncs",
            what="values are read from the GPU in every step, for which the host waits",
            why=f"{a_step:g} times a step",
            changes={"late_values": True},
            fix="keep them on the GPU (.detach()), and read them every some steps, at "
            + _places(late),
        )
    share = sum(site.seconds for site in writes) / seconds
    if share > WRITE_SHARE:
        yield Suspect(
            name="prints",
            what="it prints too much",
            why=f"that takes {share:.0%} of a step",
            changes={"quiet": True},
            fix="print every some steps, at " + _places(writes),
        )


def suspect_fragmentation(times: int, steps: int) -> Iterator[Suspect]:
    """Suspect fragmentation after the allocator's retries."""
    if times:
        yield Suspect(
            name="retries",
            what="the allocator gives memory back to get some",
            why=f"{times} times in {steps} steps",
            changes={"expandable_segments": True},
            fix="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment",
        )


def _settings(seen: Observations) -> Iterator[Suspect]:
    if seen.anomaly:
        yield Suspect(
            name="anomaly",
            what="anomaly detection is on",
            why="each operation's place is recorded, and each gradient looked at",
            changes={"anomaly": False},
            fix=f"leave torch's anomaly detection off, {_format_setting_place(seen, 'anomaly')}",
        )
    if seen.deterministic:
        yield Suspect(
            name="deterministic",
            what="deterministic algorithms are asked for",
            why="some operations have slower ones only",
            changes={"deterministic": False},
            fix="torch.use_deterministic_algorithms(False) "
            + _format_setting_place(seen, "deterministic"),
        )
    cores = floor(seen.cores)
    if not seen.cuda and seen.threads < cores:
        yield Suspect(
            name="threads",
            what=f"torch computes in {format_count(seen.threads, 'thread')}",
            why=f"there are {cores} cores",
            changes={"threads": cores},
            fix=f"torch.set_num_threads({cores}) "
            + _format_setting_place(seen, "threads", "OMP_NUM_THREADS"),
        )
    yield from suspect_fragmentation(seen.retries, seen.steps)


def _computing(seen: Observations) -> Iterator[Suspect]:
    if seen.recomputed and seen.memory_share < ROOMY_MEMORY_SHARE:
        yield Suspect(
            name="recompute",
            what="activations are computed twice",
            why=f"{seen.memory_share:.0%} of the memory are in use",
            changes={"recompute": False},
            fix="do without torch.utils.checkpoint (gradient_checkpointing), at "
            + _places(seen.recomputed),
        )
    if eager := [one for one in seen.models if one.eager_attention]:
        yield Suspect(
            name="attention",
            what="attention runs without a fused kernel",
            why=f"{eager[0].name} has one, and is set to `eager`",
            changes={"attention": "sdpa"},
            fix=f'attn_implementation="sdpa" for the model that is called at {eager[0].place}',
        )
    plain = [one for one in seen.models if one.fp32]
    if plain and seen.capability >= AMPERE and not seen.tf32:
        yield Suspect(
            name="tf32",
            what="TF32 is off",
            why="the GPU has it, and the model computes in fp32",
            changes={"tf32": True},
            fix='torch.set_float32_matmul_precision("high") before training',
        )
    if plain and (seen.capability >= AMPERE or (not seen.cuda and seen.cpu_bf16)):
        device, its = ("cuda", "GPU") if seen.cuda else ("cpu", "CPU")
        yield Suspect(
            name="bf16",
            what="the model computes in fp32",
            why=f"the {its} has instructions for bf16, which has as large a range",
            changes={"autocast": "bf16"},
            fix=f'torch.autocast("{device}", torch.bfloat16) around the call at {plain[0].place}',
            note="" if seen.cuda else DTYPE_NOTE,
            changes_training=not seen.cuda,
        )
    slow = [one for one in seen.optimizers if one.fusible and not one.fused]
    if slow and (seen.cuda or seen.share_of(sum(o.seconds for o in slow)) > OPTIMIZER_SHARE):
        yield Suspect(
            name="fused_optimizer",
            what="the optimizer is not fused",
            why="it reads and writes its state once for each operation",
            changes={"fused": tuple(one.place for one in slow)},
            fix="; ".join(f"{one.name}(..., fused=True) at {one.place}" for one in slow),
        )


def _double_precision(seen: Observations) -> Iterator[Suspect]:
    double = [one for one in seen.models if one.fp64]
    if not double:
        return
    fix = f"torch.set_default_dtype(torch.float32) {_format_setting_place(seen, 'default_dtype')}"
    if "default_dtype" not in seen.set:
        fix = (
            "model.float() before its optimizer is made, and batches in float32, for the call at "
            f"{double[0].place}"
        )
    its = "GPU" if seen.cuda else "CPU"
    yield Suspect(
        name="fp64",
        what="the model computes in fp64",
        why=f"the {its} computes at least twice as much a second in fp32, with half of the memory",
        changes={"fp32": True},
        fix=fix,
        note=DTYPE_NOTE,
        changes_training=True,
    )


def find_remade_optimizers(seen: Observations) -> list[OptimizerObservation]:
    """Return the optimizers made anew in every step."""
    return [one for one in seen.optimizers if one.remade >= REMADE_SHARE * seen.steps]


def _remade_optimizers(seen: Observations) -> Iterator[Suspect]:
    remade = find_remade_optimizers(seen)
    if not remade:
        return
    share = seen.share_of(sum(one.seconds for one in remade))
    yield Suspect(
        name="remade_optimizer",
        what="an optimizer is made anew in every step",
        why=f"its state is lost each time, and it takes {share:.0%} of a step",
        changes={"reuse_optimizer": tuple(one.place for one in remade)},
        fix="make it once, before the loop, at "
        + ", ".join(f"{one.place} ({one.name})" for one in remade),
        note=STATE_NOTE,
        changes_training=True,
    )


def _launches(seen: Observations, kernels_share: float | None) -> Iterator[Suspect]:
    plain = [one for one in seen.models if not one.compiled]
    compiles = seen.capability >= VOLTA if seen.cuda else seen.compiler
    if not plain or not compiles:
        return
    if kernels_share is not None and kernels_share < LAUNCH_SHARE:
        yield Suspect(
            name="launches",
            what="the GPU waits for its next kernel: kernels are small",
            why=f"it computes in {kernels_share:.0%} of a step",
            changes={"compile": "reduce-overhead"},
            fix='model.compile(mode="reduce-overhead"), before the call at ' + plain[0].place,
        )
    yield Suspect(
        name="compile",
        what="the model is not compiled",
        why="compiled code fuses what lies between products",
        changes={"compile": "default"},
        fix=f"model.compile(), before the call at {plain[0].place}",
        costly=not seen.cuda,  # each window's process compiles again, at the cost of many steps
    )


def _batches(seen: Observations, kernels_share: float | None) -> Iterator[Suspect]:
    """Suspect small batches, unless data is the bottleneck."""
    optimizer_share = seen.share_of(sum(one.seconds for one in seen.optimizers))
    launching = kernels_share is not None and kernels_share < LAUNCH_SHARE
    small = launching if seen.cuda else optimizer_share > SMALL_SHARE
    doubled = {one.place: 2 * one.batch_size for one in seen.loaders if one.batch_size}
    if (
        not small
        or not doubled
        or seen.memory_share > ROOMY_MEMORY_SHARE
        or seen.input_share > MIN_STARVED_SHARE
    ):
        return
    why = "kernels are small" if launching else f"updates take {optimizer_share:.0%} of a step"
    yield Suspect(
        name="batch",
        what="batches are small",
        why=why,
        changes={"batch_size": doubled},
        fix="; ".join(f"DataLoader(..., batch_size={n}) at {p}" for p, n in doubled.items()),
        note=BATCH_NOTE,
        changes_training=True,
    )


def _places(sites: tuple[Site, ...] | list[Site]) -> str:
    named = list(dict.fromkeys(site.place for site in sites))
    more = f" and {len(named) - SITES} lines more" if len(named) > SITES else ""
    return ", ".join(named[:SITES]) + more


def _format_setting_place(seen: Observations, what: str, else_at: str = "the environment") -> str:
    return f"at {seen.set[what]}" if what in seen.set else f"(see {else_at})"
