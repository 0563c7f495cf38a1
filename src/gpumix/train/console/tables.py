"""Tables of profile and plan. Imports no torch: shown before any rank runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpumix.cost.input_time import MIN_STARVED_SHARE
from gpumix.hardware.estimates.estimate import list_assumed_classes
from gpumix.schema.cluster.kernels import SettingChoice
from gpumix.schema.plan.explanation import Bottlenecks, ClassWorth, MixingComparison
from gpumix.schema.plan.plan import Plan, Prediction
from gpumix.schema.plan.stage import PLAIN, Stage, Worker
from gpumix.schema.profile.profile import ROOT, Profile
from gpumix.schema.units import hide_exact_bytes, show_bytes, show_seconds

WIDEST_COLUMN = 56  # of a text column: terminals have a hundred columns
HARDLY_WORTH_SPEEDUP = 1.01  # a smaller speed-up is no reason to mix
PLAN_WIDTHS = {"state share": 8, "memory": 12, "backward": 16}
EMULATED = "emulated devices: times are of the emulation, not of any real card"


def profile_table(profile: Profile) -> RenderableType:
    """Return a table with a row per class: time of a sample through the model, and its scaling."""
    table = new_table(
        "profile", "class", "blocks\nforward", "blocks\nbackward", "embedding\nand head",
        "best micro-\nbatch", "samples/s",
    )  # fmt: skip
    for measured in profile.classes:
        units = [measured.units[kind] for kind in profile.model.kind_of_call]
        root = measured.units[ROOT]
        sizes = root.forward.sizes
        forward, backward = (
            [sum(values) for values in zip(*(getattr(u, way).values for u in units))]
            for way in ("forward", "backward")
        )
        rest = [f + b for f, b in zip(root.forward.values, root.backward.values)]
        per_s = [n / (f + b + r) for n, f, b, r in zip(sizes, forward, backward, rest)]
        best = max(range(len(sizes)), key=per_s.__getitem__)
        table.add_row(
            measured.device_class,
            show_seconds(forward[0]),
            show_seconds(backward[0]),
            show_seconds(rest[0]),
            f"{sizes[best]:.0f}",
            f"{per_s[best]:.2f}",
        )
    note = Text(
        f"{profile.model.parameters / 1e6:.2f} M parameters in {len(profile.model.calls)} blocks; "
        "times are of one sample; backward recomputes activations, which a plan may leave out; "
        f"measured in {show_seconds(profile.seconds_spent)} with "
        f"torch {profile.torch_version}",
        style="dim",
    )
    return Group(add_notes(table, profile.cluster.emulated), note)


def efficiency_table(profile: Profile) -> RenderableType:
    """Return a table of each class's compute choices, with reasons; equal classes share rows."""
    table = new_table("how devices compute", "class", "what", "choice", "why")
    for column in table.columns:
        column.justify = "left"
    table.columns[0].no_wrap = False
    table.columns[-1].max_width = WIDEST_COLUMN
    alike: dict[tuple[SettingChoice, ...], list[str]] = {}
    for measured in profile.classes:
        alike.setdefault(measured.choices, []).append(measured.device_class)
    for choices, names in alike.items():
        for number, one in enumerate(choices):
            name = "\n".join(names) if number == 0 else ""
            table.add_row(name, one.what.replace("_", " "), one.value, one.why)
    return table if table.row_count else Group()


def plan_table(plan: Plan) -> RenderableType:
    """Return the plan as a table of compute and storage, with the verdict on mixing, the prediction
    and the reasons."""
    worth = {} if plan.reasons is None else {w.device_class: w for w in plan.reasons.worth}
    columns = ["class", "devices", "samples", "micro-\nbatches", "state share", "memory", "busy"]
    in_stages = len(plan.stages) > 1
    columns = ["stage", "blocks", *columns] if in_stages else columns
    told = any(worker.mode != PLAIN or worker.kept_graphs for worker in plan.workers)
    columns += ["backward"] if told else []
    columns += ["worth", "one more"] if worth else []
    table = new_table(f"plan ({plan.strategy})", *columns)
    for column in table.columns:
        column.max_width = PLAN_WIDTHS.get(str(column.header))
    predicted = {w.device: w for w in plan.prediction.workers} if plan.prediction else {}
    seen: set[str] = set()
    for place, stage, workers in _rows(plan):
        name, samples = workers[0].device_class, workers[0].samples
        of_device = predicted.get(workers[0].device)
        memory = busy = ""
        if of_device is not None and plan.prediction is not None:
            limit = of_device.memory_limit_bytes
            memory = f"{show_bytes(of_device.peak_bytes)} of {show_bytes(limit)}"
            if of_device.host_bytes:
                memory += f", {show_bytes(of_device.host_bytes)} on the host"
            busy = f"{of_device.busy_s / plan.prediction.step_s:.0%}"
        share = sum(w.state_share for w in workers) / len(workers)
        cells = [name, _devices(stage, workers), str(samples), _micro(workers[0])]
        cells = [place, str(len(stage.units)), *cells] if in_stages else cells
        where = " on the host" if workers[0].state_on == "host" else ""
        stored = f"{share:.1%}" if plan.zero_stage else "whole"
        cells += [f"{stored}{where}", memory, busy]
        cells += [_backward(workers[0], plan)] if told else []
        if worth:
            cells += _worth(worth[name]) if name in worth and name not in seen else ["", ""]
        seen.add(name)
        table.add_row(*cells)
    first, *rest = explain_plan(plan) or [""]
    return Group(
        *([Text(first, style="bold")] if first else []),
        add_notes(table, plan.emulated, plan.estimated),
        *(Text(line) for line in rest),
    )


def _rows(plan: Plan) -> Iterator[tuple[str, Stage, list[Worker]]]:
    """Yield equal workers of a stage, with the stage's number counted from 1."""
    for number, stage in enumerate(plan.stages, start=1):
        for _, members in groupby(sorted(stage.workers, key=_alike), key=_alike):
            yield str(number), stage, list(members)


def explain_plan(plan: Plan) -> list[str]:
    """Explain whether mixing pays, the prediction, the bottleneck and the alternatives."""
    expected, reasons = plan.prediction, plan.reasons
    if expected is None:
        return []
    predicted = (
        f"predicted: {show_seconds(expected.step_s)} a step, {expected.tokens_per_s:.0f} tokens/s"
        f"{_describe_gap(expected)}"
    )
    if reasons is None:  # of an edited plan
        return [predicted, _describe_choices(plan)]
    lines = [] if reasons.mixing is None else [describe_mixing(reasons.mixing, plan.strategy)]
    if reasons.hosts_left_out:
        named = _few("hosts", reasons.hosts_left_out)
        lines.append(
            f"{named} left out: the links between hosts would cost more time than they save"
        )
    if reasons.devices_left_out:
        named = _few("GPUs", reasons.devices_left_out)
        if plan.strategy == "model":
            lines.append(
                f"{named} left out: each pipeline stage needs a layer, and there are no more"
            )
        else:
            more = (
                "more GPUs" if plan.uses_tensor_parallel or len(plan.stages) > 1 else "longer rings"
            )
            lines.append(f"{named} left out: {more} would cost more time than they save")
    if reasons.in_no_tp_group:
        named = _few("GPUs", reasons.in_no_tp_group)
        lines.append(f"{named} left out: too few of a type on a host for a tensor-parallel group")
    lines.append(predicted)
    if expected.input_s >= expected.step_s * (1.0 - MIN_STARVED_SHARE):
        lines.append(f"bottleneck: reading samples, {show_seconds(expected.input_s)} on the host")
    else:
        lines.append(f"bottleneck: {describe_bottlenecks(reasons.binds)}")
    lines.append(_describe_choices(plan))
    for of_class in reasons.dtypes:
        named = f"{of_class.device_class} computes in {of_class.compute_dtype}"
        lines.append(f"{named}: {of_class.why}")
    for other in reasons.alternatives:
        took = "not possible" if other.step_s is None else f"{show_seconds(other.step_s)} a step"
        lines.append(f"against {other.strategy}: {took}; {hide_exact_bytes(other.why)}")
    return lines


def _few(what: str, names: Sequence[str]) -> str:
    """Name a single item; count several, with the first names."""
    if len(names) == 1:
        return names[0]
    return f"{len(names)} {what} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"


def describe_mixing(found: MixingComparison, strategy: str = "optimal") -> str:
    """Explain in one line whether mixing pays by a strategy."""
    left_out = ", ".join(found.left_out)
    if found.pays:
        more = (
            f"; {left_out} left out: they would cost more time than they save" if left_out else ""
        )
        if found.speedup is None:
            return (
                f"mixing pays: no GPU type alone can train this batch with these techniques{more}"
            )
        best = f"{found.best_class} alone, the best GPU type{more}"
        if found.speedup < HARDLY_WORTH_SPEEDUP:
            return f"mixing hardly pays: {found.speedup - 1:.1%} faster than {best}"
        return f"mixing pays: {found.speedup:.2f} times as fast as {best}"
    if left_out:
        return (
            f"mixing does not pay: only {found.best_class} trains, {left_out} would cost more time "
            "than they save"
        )
    assert found.speedup is not None, "what does not pay is slower than something"
    if strategy != "optimal":
        return (
            f"mixing does not pay as '{strategy}' does it: with {found.best_class} alone a step "
            f"takes {found.speedup:.0%} of the time; see `--strategy optimal`"
        )
    return (
        f"mixing does not pay: with {found.best_class} alone a step takes {found.speedup:.0%} of "
        "the time; use a cluster of that type alone"
    )


def describe_bottlenecks(found: Bottlenecks) -> str:
    """Name the bottlenecks of a step in a few words."""
    parts = [f"compute of {', '.join(found.compute)}"]
    parts += [f"memory of {', '.join(found.memory)}"] if found.memory else []
    parts += [f"links {found.link} ({found.waiting:.0%} of the step)"] if found.link else []
    return "; ".join(parts)


def _describe_gap(expected: Prediction) -> str:
    """Describe the gap between a plan and the lower bound."""
    if expected.bound_s is None or expected.step_s <= 0:
        return ""
    gap = 1.0 - expected.bound_s / expected.step_s
    others = "of those searched"
    if gap < 1e-6:
        return f"; no plan {others} takes less"
    bound = show_seconds(expected.bound_s)
    return f"; no plan {others} takes less than {bound} ({gap:.2%} less)"


def _describe_choices(plan: Plan) -> str:
    """Describe the choices common to all devices."""
    among = "all GPUs" if plan.sharding == "all" else "the GPUs of each host"
    among = "the GPUs of each pipeline stage" if len(plan.stages) > 1 else among
    collectives = plan.collectives
    padding = f" to {collectives.padding:g} times" if collectives.padding > 1 else ""
    what = (
        "nothing sharded",
        "optimizer state",
        "optimizer state and gradients",
        "parameters, gradients and optimizer state",
    )
    divided = f"{what[plan.zero_stage]} sharded over {among}" if plan.zero_stage else what[0]
    alone = len(plan.workers) == 1
    told = f"; collectives: {collectives.gather} gather, {collectives.reduce} reduction{padding}"
    return f"ZeRO stage {plan.zero_stage}, {divided}{'' if alone else told}{_schedule(plan)}"


def _schedule(plan: Plan) -> str:
    """Describe the path of micro-batches through tensor-parallel groups and stages."""
    sizes = ", ".join(map(str, plan.degrees))
    groups = f"; tensor-parallel groups of {sizes}" if plan.uses_tensor_parallel else ""
    if any(stage.sequence for stage in plan.stages):
        groups += ", with sequence parallelism"
    waves = f" in {plan.waves} waves" if plan.waves > 1 else ""
    if len(plan.stages) == 1:
        return f"; micro-batches{waves}{groups}" if waves else groups
    return f"; {len(plan.stages)} pipeline stages, schedule {plan.schedule}{waves}{groups}"


def _worth(worth: ClassWorth) -> list[str]:
    whole = "needed" if worth.whole is None else f"{worth.whole:+.1%}"
    return [whole, f"{worth.one_more:+.1%}"]


def _alike(worker: Worker) -> tuple[str, int, int, float, str, int, int]:
    return (
        worker.device_class,
        worker.samples,
        worker.micro_batch,
        round(worker.state_share, 3),
        worker.mode.describe(),
        worker.kept_graphs,
        worker.parts,
    )


def _devices(stage: Stage, workers: Sequence[Worker]) -> str:
    """Count workers, with the size of their groups if groups of a stage differ."""
    size = stage.get_tp_size(workers[0])
    in_groups = (
        f" in tensor-parallel groups of {size}" if stage.has_mixed_degrees and size > 1 else ""
    )
    return f"{len(workers)}{in_groups}"


def _backward(worker: Worker, plan: Plan) -> str:
    """Describe the mode, and the graphs kept despite activation checkpointing."""
    text = worker.mode.describe()
    if worker.kept_graphs:
        pairs = len(plan.stages[0].units) * len(worker.micro_batches)
        text += f", {min(worker.kept_graphs, pairs)} of {pairs} graphs kept"
    return text


def _micro(worker: Worker) -> str:
    sizes = worker.micro_batches
    if not sizes:
        return "none"
    full = [s for s in sizes if s == sizes[0]]
    rest = f" + {sizes[-1]}" if sizes[-1] != sizes[0] else ""
    return f"{len(full)} x {sizes[0]}{rest}"


def new_table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        expand=False,
    )
    for number, column in enumerate(columns):
        left = number == 0
        justify: Literal["left", "right"] = "left" if left else "right"
        table.add_column(column, justify=justify, no_wrap=left, overflow="fold")
    return table


def describe_estimates(names: Sequence[str]) -> str:
    """Say that the times of classes are estimated, and how far measured ones may be off."""
    what = f"times of {', '.join(names)} are an estimate from datasheets: "
    assumed = list_assumed_classes(names)
    if not assumed:
        return f"{what}measured ones may be a third longer or shorter"
    which = "" if len(assumed) == len(names) else f" for {', '.join(assumed)}"
    return f"{what}how far measured ones may be off is not known{which}"


def add_notes(table: Table, emulated: bool, estimated: Sequence[str] = ()) -> RenderableType:
    """Return the table, with a note below on times not measured on real cards."""
    labels = [EMULATED] if emulated else []
    if estimated:
        labels.append(describe_estimates(estimated))
    return Group(table, *(Text(label, style="yellow") for label in labels)) if labels else table
