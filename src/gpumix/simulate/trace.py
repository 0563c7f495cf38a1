"""A replayed step as spans for the viewer: one process per device, one thread per stream."""

from __future__ import annotations

from collections.abc import Iterator

from gpumix.simulate.replay import Event, Idle, Replay
from gpumix.simulate.timeline import critical_path
from gpumix.spec.plan import Plan
from gpumix.spec.trace import Span, Trace, event, process_of, wait

DEVICES = 256  # of more than that, those that are alike are shown as one


def trace_of(replay: Replay, plan: Plan) -> Trace:
    """All events of the step on all devices, in rank order; of devices that are alike only the
    first, where there are more than `DEVICES`."""
    return Trace.of(_spans(replay, plan))


def _spans(replay: Replay, plan: Plan) -> Iterator[Span]:
    critical = {id(event) for event in critical_path(replay)}
    by_lane = _by_lane(replay)
    for lane, process in _processes(replay, plan):
        yield from (_span(replay, what, process, critical) for what in by_lane[lane])


def _by_lane(replay: Replay) -> list[list[Event | Idle]]:
    """What the ranks of each lane do and wait for."""
    found: list[list[Event | Idle]] = [[] for _ in replay.lanes]
    for done in replay.events:
        if done.kind != "overhead":  # they wait for that
            for lane in found if done.lane is None else [found[done.lane]]:
                lane.append(done)
    for waited in replay.idle:
        found[waited.lane].append(waited)
    return found


def _processes(replay: Replay, plan: Plan) -> Iterator[tuple[int, str]]:
    """Lanes in rank order, with the device's name, or those of a lane put together."""
    lanes, workers = enumerate(replay.lanes), plan.workers
    if len(workers) > DEVICES:
        for number, lane in lanes:
            first = process_of(lane.worker, emulated=plan.emulated)
            yield number, f"{len(lane.ranks)} devices like {first}"
        return
    for rank, number in sorted((rank, number) for number, lane in lanes for rank in lane.ranks):
        yield number, process_of(workers[rank], emulated=plan.emulated)


def _span(replay: Replay, what: Event | Idle, process: str, critical: set[int]) -> Span:
    start_s, end_s = what.start, what.end
    if isinstance(what, Idle):
        binds = what.cause == "overhead"  # nothing else happens meanwhile
        return wait(what.cause, process=process, start_s=start_s, end_s=end_s, critical=binds)
    assert what.kind != "overhead", "it is waited for"
    return event(
        what.kind,
        replay.unit(what.call),
        process=process,
        start_s=start_s,
        end_s=end_s,
        micro_batches=what.micro_batches,
        critical=id(what) in critical,
    )
