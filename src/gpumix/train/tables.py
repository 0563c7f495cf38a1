"""Devices, profile and plan as tables. No torch: they are shown before any rank runs."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpumix.planner.explain import binding, mixing
from gpumix.spec.cluster import Cluster
from gpumix.spec.plan import Plan, Worker
from gpumix.spec.profile import ROOT, Profile
from gpumix.spec.units import show_bytes, show_seconds

NO_WRAP = 10_000
EMULATED = "emulated devices: times are of the emulation, not of any real card"


def stderr() -> Console:
    """Where gpumix talks; stdout is for data. A run goes on when nobody listens any more."""
    console = _Console(stderr=True, highlight=False)
    # In a file or a pipe there is no width to fit into.
    return console if console.is_terminal else _Console(stderr=True, highlight=False, width=NO_WRAP)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """By default this ends the process."""
        self.quiet = True


def devices_table(cluster: Cluster) -> RenderableType:
    """One row per device class."""
    table = new_table("devices", "class", "devices", "memory", "what", "hosts")
    for row in cluster.rows():
        table.add_row(*(str(row[key]) for key in ("class", "devices", "memory", "what", "hosts")))
    return labelled(table, cluster.emulated)


def profile_table(profile: Profile) -> RenderableType:
    """One row per class: the time of one sample through the model, and how it scales."""
    table = new_table(
        "profile", "class", "units forward", "units backward", "root", "best micro-batch",
        "samples/s",
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
        f"{profile.model.parameters / 1e6:.2f} M parameters in {len(profile.model.calls)} units; "
        f"first three times: one sample; measured in {show_seconds(profile.seconds_spent)} with "
        f"torch {profile.torch_version}",
        style="dim",
    )
    return Group(labelled(table, profile.cluster.emulated), note)


def plan_table(plan: Plan) -> RenderableType:
    """Who computes and who stores what, what it should take, and why it won."""
    table = new_table(
        f"plan ({plan.strategy})",
        "class", "devices", "samples", "micro-batches", "state share", "memory", "busy",
    )  # fmt: skip
    predicted = {w.device: w for w in plan.prediction.workers} if plan.prediction else {}
    for (name, samples, *_), members in groupby(sorted(plan.workers, key=_alike), key=_alike):
        workers = list(members)
        of_device = predicted.get(workers[0].device)
        memory = busy = ""
        if of_device is not None and plan.prediction is not None:
            limit = of_device.memory_limit_bytes
            memory = f"{show_bytes(of_device.peak_bytes)} of {show_bytes(limit)}"
            busy = f"{of_device.busy_s / plan.prediction.step_s:.0%}"
        share = sum(w.state_share for w in workers) / len(workers)
        table.add_row(
            name, str(len(workers)), str(samples), _micro(workers[0]), f"{share:.1%}", memory, busy
        )
    lines = [Text(line) for line in why(plan)]
    return Group(labelled(table, plan.emulated), *lines)


def why(plan: Plan) -> list[str]:
    """Whether mixing pays, what is predicted, what binds, and the alternatives, in words."""
    lines = []
    if plan.prediction is not None:
        lines += mixing(plan)
        lines.append(
            f"predicted: {show_seconds(plan.prediction.step_s)} a step, "
            f"{plan.prediction.tokens_per_s:.0f} tokens/s; what binds: {binding(plan)}"
        )
    for other in plan.alternatives:
        took = "not possible" if other.step_s is None else f"{show_seconds(other.step_s)} a step"
        lines.append(f"against {other.strategy}: {took}; {other.why}")
    return lines


def _alike(worker: Worker) -> tuple[str, int, int, float]:
    return (
        worker.device_class,
        worker.samples,
        worker.micro_batch,
        round(worker.state_share, 3),
    )


def _micro(worker: Worker) -> str:
    sizes = worker.micro_batches
    if not sizes:
        return "none"
    full = [s for s in sizes if s == sizes[0]]
    rest = f" + {sizes[-1]}" if sizes[-1] != sizes[0] else ""
    return f"{len(full)} x {sizes[0]}{rest}"


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0)
    return table


def labelled(table: Table, emulated: bool) -> RenderableType:
    return Group(table, Text(EMULATED, style="yellow")) if emulated else table
