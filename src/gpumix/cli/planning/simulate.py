"""`gpumix simulate`: replay of a step of a plan. Pure planning: never imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpumix.cli.common import Json, Overrides, print_result
from gpumix.cli.planning.profile_source import (
    ClusterText,
    ModelText,
    NetworkText,
    PlanOptions,
    find_profile_beside,
)
from gpumix.schema.errors import InputError
from gpumix.schema.reading.error_location import join_locations, locate_errors

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from gpumix.schema.plan.plan import Plan
    from gpumix.schema.plan.stage import Worker
    from gpumix.schema.plan.step_trace import Trace
    from gpumix.schema.profile.profile import Profile
    from gpumix.simulate.replay import EqualRanks, Event, Replay
    from gpumix.simulate.timeline import LaneUtilization

MOST_LINES = 12  # of the critical path


def simulate(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan, a JSON file.")],
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Take times from this profile.")
    ] = None,
    job: Annotated[
        Path | None, typer.Option("--job", help="Take times from what was measured of this job.")
    ] = None,
    cluster: ClusterText = None,
    network: NetworkText = None,
    model: ModelText = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace for ui.perfetto.dev here.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="Draw the step here: a PNG, or SVG. Needs matplotlib."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Replay one step of a plan: what binds it, who waits for what, and a trace.

    Times come from the profile next to the plan, if none is given. Open the trace in
    ui.perfetto.dev.

    Example: gpumix simulate runs/first/plan.json --trace simulated.json
    Example: gpumix simulate runs/first/plan.json --picture step.png
    Example: gpumix simulate plan.json --cluster "4x rtx3090, 2x p40" --model 3B
    """
    from rich.console import Group

    from gpumix.schema.plan.plan import Plan
    from gpumix.simulate.events import simulate as replay_of
    from gpumix.simulate.trace import build_trace

    planned = Plan.load(plan)
    asked = PlanOptions(
        job, overrides=overrides, cluster=cluster, network=network, model=model, measures=False
    )
    if cluster is not None and profile is None:
        with locate_errors(plan):
            _refuse_other_cards(planned, cluster, network)
    if job is None:
        asked = replace(
            asked,
            sequence_length=planned.sequence_length,
            global_batch=planned.global_batch,
            dtypes={w.device_class: w.compute_dtype for w in planned.workers},
        )
    if profile is None and job is None and cluster is None:
        profile = find_profile_beside(plan)
    times, note = _get_profile(profile, asked)
    with locate_errors(join_locations(plan, profile)):
        replay = replay_of(times, planned)
    if trace is not None:
        build_trace(replay, planned).save(trace)
    if picture is not None:
        _draw(build_trace(replay, planned), planned, picture)
    print_result(
        lambda: _as_dict(replay, planned, times),
        lambda: Group(*_render_replay(replay, planned, times)),
        as_json,
        note,
    )


def _draw(trace: Trace, plan: Plan, path: Path) -> None:
    from gpumix.report.step_picture import draw_panels, make_panel

    draw_panels([make_panel(trace, plan.strategy).with_idle_share()], path)


def _refuse_other_cards(plan: Plan, cluster: str, network: str | None) -> None:
    """Raise InputError if the cluster lacks a class of the plan: no estimate is possible."""
    from gpumix.hardware.estimates.cluster_shorthand import parse_cluster as described

    there = {c.name for c in described(cluster, "auto", network).classes}
    missing = sorted({w.device_class for w in plan.workers} - there)
    if missing:
        raise InputError(
            f"the plan has devices of class {', '.join(missing)}, which are not there",
            code="plan-device-class-missing",
            where="--cluster",
            why=f"its classes are {', '.join(sorted(there))}",
            fix="name the cards that the plan was made for, or plan for these: gpumix plan",
        )


def _get_profile(profile: Path | None, asked: PlanOptions) -> tuple[Profile, str]:
    """Return the profile given or asked for, and a note on it."""
    from gpumix.schema.profile.profile import Profile

    if profile is None:
        if asked.job is None and asked.cluster is None:
            raise InputError(
                "a plan has no speeds of its devices, and there is no profile next to it",
                code="plan-without-profile",
                fix="give what it was made from: --profile PROFILE.json, --job JOB.yaml, or "
                "--cluster and --model",
            )
        source = asked.source()
        return source.profile, source.note
    others = {
        "--job": asked.job,
        "--cluster": asked.cluster,
        "--network": asked.network,
        "--model": asked.model,
        "--set": asked.overrides or None,
    }
    for name, value in others.items():
        if value is not None:
            raise InputError(
                f"{name} has no effect together with --profile",
                code="option-without-effect",
                fix="give one of them",
            )
    return Profile.load(profile), ""


# -- as JSON ---------------------------------------------------------------------------------------


def _as_dict(replay: Replay, plan: Plan, times: Profile) -> dict[str, Any]:
    """Return the replay as JSON values. `lane` indexes `lanes`, groups of equal devices; None is
    all devices."""
    from gpumix.cost.traffic import count_traffic
    from gpumix.simulate.timeline import (
        compute_utilization,
        find_critical_path,
        list_critical_segments,
    )

    return {
        "step_s": replay.step_s,
        "predicted_s": replay.predicted_s,
        "emulated": plan.emulated,
        "estimated": list(times.estimated),
        "traffic": [
            {"device": w.device, "collectives": dict(t.counts), "bytes": dict(t.bytes)}
            for w, t in zip(plan.workers, count_traffic(times, plan))
        ],
        "critical_path": [asdict(stretch) for stretch in list_critical_segments(replay)],
        "critical_events": [_format_event(event, replay) for event in find_critical_path(replay)],
        "lanes": [_format_use(use, plan.workers) for use in compute_utilization(replay)],
    }


def _format_event(event: Event, replay: Replay) -> dict[str, Any]:
    return {
        "kind": event.kind,
        "unit": replay.unit(event.call),
        "lane": event.lane,
        "start_s": event.start,
        "end_s": event.end,
        "micro_batches": list(event.micro_batches),
    }


def _format_use(use: LaneUtilization, workers: Sequence[Worker]) -> dict[str, Any]:
    worker = use.lane.worker
    return {
        "devices": [workers[rank].device for rank in use.lane.ranks],
        "device_class": worker.device_class,
        "samples": worker.samples,
        "busy_s": use.busy_s,
        "idle_s": use.idle_s,
    }


# -- for people ------------------------------------------------------------------------------------


def _render_replay(replay: Replay, plan: Plan, times: Profile) -> Iterable[RenderableType]:
    from gpumix.schema.units import show_seconds
    from gpumix.simulate.timeline import compute_utilization
    from gpumix.train.console.tables import add_notes

    off = replay.step_s / replay.predicted_s - 1 if replay.predicted_s else 0.0
    off = round(off, 3) + 0.0  # no -0.0
    yield (
        f"simulated: {show_seconds(replay.step_s)} a step; the planner's formula says "
        f"{show_seconds(replay.predicted_s)} ({off:+.1%})"
    )
    yield _make_critical_path_table(replay)
    if len(plan.workers) > 1:
        yield _make_traffic_table(plan, times)
    table = _idle_table(compute_utilization(replay), replay.step_s)
    yield add_notes(table, plan.emulated, times.estimated)


def _make_critical_path_table(replay: Replay) -> RenderableType:
    """Return the critical path as a table; of many stretches the longest."""
    from gpumix.schema.units import show_seconds
    from gpumix.simulate.timeline import list_critical_segments
    from gpumix.train.console.tables import new_table

    table = new_table("critical path", "what", "of", "on", "times", "takes", "of the step")
    found = list_critical_segments(replay)
    longest = sorted(found, key=lambda s: -s.seconds)[:MOST_LINES]
    for s in found:
        if s in longest:
            units = s.first if s.first == s.last else f"{s.first} to {s.last}"
            part = f"{s.seconds / replay.step_s:.1%}"
            on = "all" if s.lane is None else _format_lane(replay.lanes[s.lane])
            table.add_row(s.kind, units, on, str(s.events), show_seconds(s.seconds), part)
    rest = sum(s.seconds for s in found if s not in longest)
    if rest > 0:
        part = f"{rest / replay.step_s:.1%}"
        table.add_row("others", "", "", "", show_seconds(rest), part)
    return table


def _make_traffic_table(plan: Plan, times: Profile) -> RenderableType:
    """Return a table of the collectives of a step; of unequal ranks, the largest amounts."""
    from gpumix.cost.traffic import count_traffic
    from gpumix.schema.units import show_bytes
    from gpumix.train.console.tables import new_table

    of_ranks = count_traffic(times, plan)
    table = new_table("collectives of a step", "operation", "times", "buffers in all")
    for operation in sorted(of_ranks[0].counts):
        most = max(of.bytes[operation] for of in of_ranks)
        table.add_row(operation, str(of_ranks[0].counts[operation]), show_bytes(most))
    return table


def _format_lane(lane: EqualRanks) -> str:
    others = len(lane.ranks) - 1
    return f"{lane.worker.device} and {others} alike" if others else lane.worker.device


def _idle_table(uses: Sequence[LaneUtilization], step_s: float) -> Table:
    """Return a table with a row per class: the mean over devices, as parts of the step."""
    from gpumix.schema.plan.step_trace import CAUSES
    from gpumix.train.console.tables import new_table

    of_class: dict[str, list[LaneUtilization]] = {}
    for use in uses:
        of_class.setdefault(use.lane.worker.device_class, []).append(use)
    title = "busy, and idle by what is waited for"
    causes = [cause for cause in CAUSES if any(use.idle_s[cause] > 0 for use in uses)]
    table = new_table(title, "class", "devices", "busy", *causes)
    for name, members in of_class.items():
        counts = [len(use.lane.ranks) for use in members]
        whole = sum(counts) * step_s or 1.0
        columns = [[use.busy_s for use in members]]
        columns += [[use.idle_s[cause] for use in members] for cause in causes]
        parts = [sum(n * s for n, s in zip(counts, column)) / whole for column in columns]
        table.add_row(name, str(sum(counts)), *(f"{part:.1%}" for part in parts))
    return table
