"""A replayed step as spans for the viewer: a process per device, a thread per stream."""

from __future__ import annotations

from collections.abc import Iterator

from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.step_trace import (
    Span,
    Trace,
    format_process_name,
    make_wait_span,
    make_work_span,
)
from gpumix.simulate.replay import Event, Idle, Replay
from gpumix.simulate.timeline import find_critical_path

MAX_SEPARATE_DEVICES = 256  # with more, identical devices are shown as one


def build_trace(replay: Replay, plan: Plan) -> Trace:
    """Return all events of the step on all devices, in rank order; with more than
    `MAX_SEPARATE_DEVICES` devices, only the first of identical devices."""
    return Trace.of(_spans(replay, plan))


def _spans(replay: Replay, plan: Plan) -> Iterator[Span]:
    critical = {id(event) for event in find_critical_path(replay)}
    by_lane = _group_by_lane(replay)
    for lane, process in _processes(replay, plan):
        yield from (_make_span(replay, what, process, critical) for what in by_lane[lane])


def _group_by_lane(replay: Replay) -> list[list[Event | Idle]]:
    """Return the events and waits of each lane's ranks."""
    found: list[list[Event | Idle]] = [[] for _ in replay.lanes]
    for done in replay.events:
        if done.kind != "overhead":  # shown as a wait instead
            for lane in found if done.lane is None else [found[done.lane]]:
                lane.append(done)
    for waited in replay.idle:
        found[waited.lane].append(waited)
    return found


def _processes(replay: Replay, plan: Plan) -> Iterator[tuple[int, str]]:
    """Yield lanes in rank order, with device names; with more than `MAX_SEPARATE_DEVICES` devices,
    each lane once."""
    lanes, workers = enumerate(replay.lanes), plan.workers
    if len(workers) > MAX_SEPARATE_DEVICES:
        for number, lane in lanes:
            first = format_process_name(lane.worker, emulated=plan.emulated)
            yield number, f"{len(lane.ranks)} devices like {first}"
        return
    for rank, number in sorted((rank, number) for number, lane in lanes for rank in lane.ranks):
        yield number, format_process_name(workers[rank], emulated=plan.emulated)


def _make_span(replay: Replay, what: Event | Idle, process: str, critical: set[int]) -> Span:
    start_s, end_s = what.start, what.end
    if isinstance(what, Idle):
        binds = what.cause == "overhead"  # nothing else happens meanwhile
        return make_wait_span(
            what.cause, process=process, start_s=start_s, end_s=end_s, critical=binds
        )
    assert what.kind != "overhead", "it is waited for"
    return make_work_span(
        what.kind,
        replay.unit(what.call),
        process=process,
        start_s=start_s,
        end_s=end_s,
        micro_batches=what.micro_batches,
        critical=id(what) in critical,
    )
