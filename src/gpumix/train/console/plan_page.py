"""The page that `gpumix plan` prints and a run begins with: the answer first, in 80 columns.

Line 1 says whether the model fits and how fast it trains. Then come the gain over an even split, a
row for each GPU type, the system RAM needed, how the plan trains, and what limits it. Imports no
torch: the page is shown before any rank runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.text import Text

from gpumix.cost.input_time import MIN_STARVED_SHARE
from gpumix.hardware.estimates.estimate import list_assumed_classes
from gpumix.hardware.estimates.gpu_catalogue import shorten_product
from gpumix.schema.plan.explanation import (
    EVEN_WITHOUT_PREFIX,
    SINGLE_CLASS_PREFIX,
    Reasons,
    RejectedPlan,
)
from gpumix.schema.plan.plan import Plan, Prediction, WorkerPrediction
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import format_count, show_seconds
from gpumix.train.console.text_page import (
    Line,
    align_rows,
    iterate_commands,
    iterate_labelled,
    join_lines,
    place_at_ends,
    round_duration,
    round_estimate,
    round_seconds,
    wrap_line,
)

LONGEST_NAME = 26  # of a row
ESTIMATE_ERROR = "±33%"  # of estimates from datasheets: `benchmarks/planner_estimate.py`
UNKNOWN_ERROR = "± unknown"
MEASURED_ERROR = "±5%"  # of predictions from measurements: `benchmarks/prediction.py`
WORTH_TELLING = 1.05  # a smaller gain over an even split is told as none
GIB, MIB = 2**30, 2**20


def plan_page(
    plan: Plan,
    *,
    begins: str = "Fits.",
    doubt: str = "",
    assumed: str = "",
    steps: int | None = None,
    next_commands: Sequence[tuple[str, str]] = (),
) -> Text:
    """Return the page of a plan.

    Args:
        plan: with its prediction; without one the page has no times and no memory.
        begins: first words of the page.
        doubt: why times are uncertain beyond the usual error.
        assumed: assumptions behind an estimate, in a sentence.
        steps: of the job; None without a job.
        next_commands: pairs of a command and what it tells.
    """
    return join_lines(_lines(plan, begins, doubt, assumed, steps, next_commands))


def describe_doubt(profile: Profile | None) -> str:
    """Say that a profile was measured on a busy machine; "" if nothing shows that."""
    if profile is not None and any(c.overruns or c.disturbed() for c in profile.classes):
        return "measured while the machine was busy: may be far off"
    return ""


def advise_measuring(profile: Profile, job: str) -> str:
    """Say how to replace a kept profile of a busy machine; "" for a sound one.

    Args:
        job: the arguments that name the job.
    """
    if not describe_doubt(profile):
        return ""
    return (
        "these measurements were kept, and the machine was busy then; to measure again:\n"
        f"  gpumix profile {job} --fresh"
    )


def describe_source(estimated: Sequence[str]) -> str:
    """Say where times are from and how far they may be off.

    Args:
        estimated: GPU types whose times are estimates.
    """
    if not estimated:
        return f"from measurements, {MEASURED_ERROR}"
    error = UNKNOWN_ERROR if list_assumed_classes(estimated) else ESTIMATE_ERROR
    return f"estimate from datasheets, {error}"


def _lines(
    plan: Plan,
    begins: str,
    doubt: str,
    assumed: str,
    steps: int | None,
    next_commands: Sequence[tuple[str, str]],
) -> Iterator[Line]:
    expected, reasons = plan.prediction, plan.reasons
    if expected is not None:
        for text in _headline(plan, expected, begins, doubt):
            yield text, "bold green"
        if steps is not None:
            whole = round_duration(steps * expected.step_s)
            yield f"{format_count(steps, 'step')}: about {whole}", ""
        if reasons is not None:
            yield from _gains(plan, expected, reasons)
        yield "", ""
    else:
        yield begins, "bold"
    for text in _table(plan):
        yield text, ""
    yield "", ""
    if needed := _host_memory(plan):
        yield from iterate_labelled("Needs", needed)
    yield from iterate_labelled("How", _describe_method(plan))
    if plan.optimizer_state == "8bit":
        yield from iterate_labelled("Changes", _describe_narrow_state(plan))
    if expected is not None and reasons is not None:
        yield from iterate_labelled("Limited by", _describe_limits(plan, expected, reasons))
        if left := _left_out(plan, reasons):
            yield from iterate_labelled("Left out", left, "yellow")
    if plan.emulated:
        yield from iterate_labelled("Emulated", "times are of emulated devices, not of real GPUs")
    if assumed:
        yield from iterate_labelled("Assumed", assumed, "dim")
    if next_commands:
        yield "", ""
        yield "Next", "bold"
        yield from iterate_commands(next_commands)


def _headline(plan: Plan, expected: Prediction, begins: str, doubt: str) -> list[str]:
    speed = f"{begins} ~{round_estimate(expected.tokens_per_s)} tokens/s"
    answer = f"{speed}, {round_seconds(expected.step_s)} per step"
    return place_at_ends(answer, doubt or describe_source(plan.estimated))


# -- gains -----------------------------------------------------------------------------------------


def _gains(plan: Plan, expected: Prediction, reasons: Reasons) -> Iterator[Line]:
    """Yield the gain over an even split, and over each GPU type alone."""
    others = {other.strategy: other for other in reasons.alternatives}
    every = [o for n, o in others.items() if n == "even" or n.startswith(EVEN_WITHOUT_PREFIX)]
    if every and len(plan.workers) > 1:
        fastest = min(every, key=lambda even: even.step_s or float("inf"))
        yield from _against_even(fastest, expected.step_s)
    if (best := others.get("optimal")) is not None and best.step_s is not None:
        times = expected.step_s / best.step_s if best.step_s > 0 else 1.0
        if times >= WORTH_TELLING:
            yield f"`--strategy optimal` is {times:.1f}x as fast as this plan.", "yellow"
    yield from _against_single_types(plan, expected.step_s, others, reasons)


def _against_even(even: RejectedPlan, step_s: float) -> Iterator[Line]:
    left_out = even.strategy.removeprefix(EVEN_WITHOUT_PREFIX)
    split = "an even split (as by FSDP or DeepSpeed)"
    if left_out != even.strategy:
        split += f" that leaves out {', '.join(map(shorten_product, left_out.split(', ')))}"
    if even.step_s is None:
        text, style = f"With {split} it does not fit.", "green"
    elif (times := even.step_s / step_s if step_s > 0 else 1.0) >= WORTH_TELLING:
        text, style = f"{times:.1f}x as fast as {split}.", "green"
    else:
        text, style = f"No faster than {split}: FSDP2 does as well here.", "yellow"
    yield from ((line, style) for line in wrap_line(text))


def _against_single_types(
    plan: Plan, step_s: float, others: dict[str, RejectedPlan], reasons: Reasons
) -> Iterator[Line]:
    """Yield whether any GPU type alone fits, and the gain over the best one that does."""
    single = {
        name.removeprefix(SINGLE_CLASS_PREFIX): other
        for name, other in others.items()
        if name.startswith(SINGLE_CLASS_PREFIX)
    }
    if not single:
        return
    mixing = reasons.mixing
    counts = Counter(worker.device_class for worker in plan.workers)
    named = [
        f"{counts[name]}x {shorten_product(name)}" if name in counts else shorten_product(name)
        for name in single
    ]
    if all(other.step_s is None for other in single.values()):
        which = f"Neither {' nor '.join(named)}" if len(named) == 2 else "No GPU type"
        yield from ((t, "green") for t in wrap_line(f"{which} alone can train this."))
    elif mixing is not None and mixing.best_class is not None and mixing.speedup is not None:
        several = sum(w.device_class == mixing.best_class for w in plan.workers) > 1
        best = f"{shorten_product(mixing.best_class)}{'s' if several else ''}"
        if not mixing.pays:
            is_as_fast = "are" if several else "is"
            text = f"Using all of them does not pay: {best} alone {is_as_fast} as fast."
            if mixing.speedup < 1 / WORTH_TELLING:
                times = f"{1 / mixing.speedup:.1f}x"
                text = f"{best} alone {is_as_fast} {times} as fast: leave the rest out."
            yield from ((t, "yellow") for t in wrap_line(text))
        elif len({w.device_class for w in plan.workers}) > 1:
            text = f"{mixing.speedup:.1f}x as fast as {best} alone, the best single GPU type."
            yield from ((t, "green") for t in wrap_line(text))


# -- table -----------------------------------------------------------------------------------------

_HEAD = (
    ("samples", "per step"),
    ("micro-", "batch"),
    ("share of", "the state"),
    ("memory", "({unit})"),
    ("busy", ""),
)


def _table(plan: Plan) -> list[str]:
    """Return the lines of the table: a row for each GPU type of each pipeline stage."""
    told = {w.device: w for w in plan.prediction.workers} if plan.prediction else {}
    unit, name_of_unit = _memory_unit(told.values())
    head = [[""] * 2, *([a, b.format(unit=name_of_unit)] for a, b in _HEAD)]
    head[4][0] = "memory" if plan.emulated else "GPU memory"
    if not told:
        head = head[:4]
    rows: list[list[str] | str] = []
    for numbers, stages in _stages_by_devices(plan):
        if len(plan.stages) > 1:
            blocks = format_count(sum(len(stage.units) for stage in stages), "block")
            rows.append(f"Pipeline stage{'s' if len(numbers) > 1 else ''} {numbers}: {blocks}")
        for workers in _by_class(stages[0].workers):
            rows.append(_row(plan, stages, workers, told, unit))
    whole = plan.zero_stage > 0 or len(plan.stages) > 1
    total = ["total", str(plan.global_batch), "", "100%" if whole else "", "", ""]
    rows.append(total[: len(head)])
    lines = iter(align_rows([*zip(*head), *(row for row in rows if not isinstance(row, str))]))
    first = [next(lines), next(lines)]
    return first + [row if isinstance(row, str) else next(lines) for row in rows]


def _stages_by_devices(plan: Plan) -> list[tuple[str, list[Stage]]]:
    """Return the stages of each set of devices, with their numbers: interleaved schedules give a
    device several."""
    found: dict[tuple[str, ...], list[int]] = {}
    for number, stage in enumerate(plan.stages):
        found.setdefault(tuple(w.device for w in stage.workers), []).append(number)
    return [
        (", ".join(str(n + 1) for n in numbers), [plan.stages[n] for n in numbers])
        for numbers in found.values()
    ]


def _by_class(workers: Sequence[Worker]) -> list[list[Worker]]:
    found: dict[str, list[Worker]] = {}
    for worker in workers:
        found.setdefault(worker.device_class, []).append(worker)
    return [found[name] for name in sorted(found)]


def _row(
    plan: Plan,
    stages: Sequence[Stage],
    workers: Sequence[Worker],
    told: dict[str, WorkerPrediction],
    unit: int,
) -> list[str]:
    each = " ea" if len(workers) > 1 else ""
    shares = [_share_of_state(plan, stage, w) for stage in stages for w in workers]
    share = sum(shares) / len(workers)
    cells = [
        _shorten(f"{len(workers)}x {shorten_product(workers[0].device_class)}"),
        _few_numbers([w.samples for w in workers], each),
        _few_numbers([size for w in workers for size in w.micro_batches or (0,)]),
        f"{100 * share:.3g}%{each}",
    ]
    predicted = [told[w.device] for w in workers if w.device in told]
    if predicted and plan.prediction is not None:
        fullest = max(predicted, key=lambda p: p.peak_bytes / max(p.memory_limit_bytes, 1))
        used, limit = fullest.peak_bytes / unit, fullest.memory_limit_bytes / unit
        busy = sum(p.busy_s for p in predicted) / len(predicted)
        part = busy / plan.prediction.step_s if plan.prediction.step_s > 0 else 0.0
        cells += [f"{_memory(used)} of {_memory(limit)}", f"{part:.0%}"]
    return cells


def _share_of_state(plan: Plan, stage: Stage, worker: Worker) -> float:
    """Return a worker's share of the state of all blocks. A tensor-parallel worker holds a part of
    each block of its stage only, a pipeline stage a part of all blocks."""
    blocks = sum(len(one.units) for one in plan.stages)
    of_part = worker.state_share if plan.zero_stage else 1.0
    return of_part * worker.parts / stage.tensor * len(stage.units) / blocks


def _shorten(name: str) -> str:
    """Return a name that leaves room for the other columns."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _few_numbers(numbers: Sequence[int], each: str = "") -> str:
    """Return distinct numbers: '15 ea', '33, 35', or from three on the range '12-19'."""
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return f"{distinct[0]}{each}"
    if len(distinct) == 2 and each:
        return f"{distinct[0]}, {distinct[1]}"
    return f"{distinct[0]}-{distinct[-1]}"


def _memory_unit(told: Iterable[WorkerPrediction]) -> tuple[int, str]:
    most = max((w.memory_limit_bytes for w in told), default=GIB)
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB")


def _memory(amount: float) -> str:
    return f"{amount:.1f}" if amount < 1000 else f"{amount:.0f}"


# -- lines below the table -------------------------------------------------------------------------


def _host_memory(plan: Plan) -> str:
    """Describe the system RAM that the plan keeps data in, and that loading takes; empty for none
    and little."""
    kept, loading = _kept_on_hosts(plan), _loading_memory(plan)
    if kept and loading:
        return f"{kept}; {loading} more while weights load"
    return kept or (f"{loading} of free system RAM while weights load" if loading else "")


def _loading_memory(plan: Plan) -> str:
    """Describe the system RAM that loading takes on the host where most GPUs are; empty for
    little."""
    if plan.prediction is None:
        return ""
    processes = max(Counter(worker.host for worker in plan.workers).values())
    most = processes * plan.prediction.loading_bytes
    return f"{round_estimate(most / GIB)} GiB" if most >= GIB else ""


def _kept_on_hosts(plan: Plan) -> str:
    """Describe the system RAM that the plan keeps data in; empty for none."""
    told = plan.expected_by_device
    by_host: dict[str, int] = {}
    for worker in plan.workers:
        of_device = told.get(worker.device)
        if of_device is not None and of_device.host_bytes:
            by_host[worker.host] = by_host.get(worker.host, 0) + of_device.host_bytes
    if not by_host:
        return ""
    kept = ["parameters"] if plan.parameters_on == "host" else []
    kept += ["optimizer state"] if any(w.state_on == "host" for w in plan.workers) else []
    kept += ["activations"] if any(w.mode.boundary == "host" for w in plan.workers) else []
    most = max(by_host.values())
    amount = f"{round_estimate(most / GIB)} GiB" if most >= GIB else f"{most / MIB:.0f} MiB"
    where = "" if len(by_host) == 1 else " on the host that needs most"
    what = f" for offloaded {' and '.join(kept)}" if kept else ""
    total = ""
    if len(by_host) > 1:
        total = f"; {round_estimate(sum(by_host.values()) / GIB)} GiB in all"
    return f"{amount} of free system RAM{where}{what}{total}"


def _describe_narrow_state(plan: Plan) -> str:
    """Say what state in 8 bits changes, and how long an update takes."""
    text = "results are those of AdamW in 8 bits, as of bitsandbytes, not of AdamW in fp32"
    if plan.prediction is None:
        return text
    longest = max(worker.optimizer_s for worker in plan.prediction.workers)
    return f"{text}; updates take at most {round_seconds(longest)} of a step"


def _describe_method(plan: Plan) -> str:
    """Describe sharding, recomputing, offloading, stages and tensor parallelism in the usual
    terms."""
    zero = {0: "data parallel (DDP-like)", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3 (FSDP-like)"}
    parts = [zero[plan.zero_stage]] if plan.parameters_on == "device" else []
    if plan.sharding == "host" and plan.parameters_on == "device":
        parts.append("sharded inside each host (HSDP-like)")
    if len(plan.stages) > 1:
        parts.append(f"{len(plan.stages)} pipeline stages ({plan.schedule})")
    elif plan.waves > 1:
        parts.append(f"{plan.waves} passes a step (gradient accumulation)")
    if plan.uses_tensor_parallel:
        sizes = " and ".join(f"TP={size}" for size in plan.degrees if size > 1)
        parts.append(f"tensor parallelism ({sizes})")
    computing = [w for w in plan.workers if w.samples]
    parts += _for_some(computing, lambda w: w.mode.recompute, "activation checkpointing")
    parts += _for_some(computing, lambda w: w.mode.boundary == "host", "activations on the CPU")
    if plan.parameters_on == "host":
        parts.append("parameters and optimizer in system RAM")
    else:
        parts += _for_some(plan.workers, lambda w: w.state_on == "host", "optimizer on the CPU")
    parts += ["8-bit optimizer state"] if plan.optimizer_state == "8bit" else []
    parts += _for_some(computing, lambda w: w.mode.head == "chunked", "chunked cross-entropy")
    parts += _for_some(computing, lambda w: w.mode.order == "sequential", "sequential batches")
    dtypes = {w.compute_dtype for w in plan.workers}
    if len(dtypes) == 1:
        parts.append(next(iter(dtypes)))
    else:
        for dtype in sorted(dtypes):
            names = sorted({w.device_class for w in plan.workers if w.compute_dtype == dtype})
            parts.append(f"{dtype} on {', '.join(map(shorten_product, names))}")
    return ", ".join(parts)


def _for_some(workers: Sequence[Worker], is_so: Callable[[Worker], bool], text: str) -> list[str]:
    """Return the text if it is so for all workers, with the GPU types if only for some."""
    so = [w for w in workers if is_so(w)]
    if not so:
        return []
    if len(so) == len(workers):
        return [text]
    names = sorted({w.device_class for w in so})
    return [f"{text} on {', '.join(map(shorten_product, names))}"]


def _describe_limits(plan: Plan, expected: Prediction, reasons: Reasons) -> str:
    if expected.input_s >= expected.step_s * (1.0 - MIN_STARVED_SHARE):
        return f"reading samples, {show_seconds(expected.input_s)} a step on the host"
    binds, every = reasons.binds, {w.device_class for w in plan.workers}

    def of(names: Sequence[str]) -> str:
        return "every GPU" if set(names) == every else ", ".join(map(shorten_product, names))

    parts = [f"compute of {of(binds.compute)}"]
    parts += [f"memory of {of(binds.memory)}"] if binds.memory else []
    if binds.link:
        parts.append(f"links {binds.link}, {binds.waiting:.0%} of a step")
    return "; ".join(parts)


def _left_out(plan: Plan, reasons: Reasons) -> str:
    """Describe classes, hosts and devices that take no part, with the reason."""
    parts = []
    classes = reasons.mixing.left_out if reasons.mixing is not None else ()
    if classes:
        parts.append(f"{', '.join(map(shorten_product, classes))}: would slow down the rest")
    if reasons.hosts_left_out:
        parts.append(f"{_few(reasons.hosts_left_out, 'host')}: the link costs more than it gives")
    if reasons.devices_left_out:
        why = "no more blocks to give" if plan.strategy == "model" else "costs more than it gives"
        parts.append(f"{_few(reasons.devices_left_out, 'device')}: {why}")
    if reasons.in_no_tp_group:
        few = _few(reasons.in_no_tp_group, "device")
        parts.append(f"{few}: too few of a type on a host for tensor parallelism")
    return "; ".join(parts)


def _few(names: Sequence[str], noun: str) -> str:
    """Name up to three; count more."""
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} {noun}s"
