"""A replayed step as spans for the viewer: one process per device, one thread per stream."""

from __future__ import annotations

from collections.abc import Iterator

from gpumix.simulate.events import Event, Replay
from gpumix.simulate.program import Lane
from gpumix.simulate.timeline import COMPUTING, critical_path
from gpumix.spec.plan import Plan
from gpumix.spec.trace import STREAMS, Span, Stream, Trace

DEVICES = 256  # of more than that, those that are alike are shown as one


def trace_of(replay: Replay, plan: Plan) -> Trace:
    """All events of the step on all devices, in rank order; of devices that are alike only the
    first, where there are more than `DEVICES`."""
    return Trace.of(spans_of(replay, plan))


def spans_of(replay: Replay, plan: Plan) -> Iterator[Span]:
    """As `trace_of`; of each process by stream and time."""
    critical = {id(event) for event in critical_path(replay)}
    common, own = _by_lane(replay)
    for number, rank in _shown(replay, plan):
        process = _name(replay.program.lanes[number], plan, rank)
        for event in sorted((*own[number], *common), key=_place):
            yield _span(replay, event, process, critical=id(event) in critical)


def _by_lane(replay: Replay) -> tuple[list[Event], list[list[Event]]]:
    """The events of all ranks together, and those of each lane."""
    common: list[Event] = []
    own: list[list[Event]] = [[] for _ in replay.program.lanes]
    for event in replay.events:
        (common if event.lane is None else own[event.lane]).append(event)
    return common, own


def _place(event: Event) -> tuple[int, float]:
    return STREAMS.index(_stream(event)), event.start


def _shown(replay: Replay, plan: Plan) -> list[tuple[int, int | None]]:
    """Lanes and ranks in rank order; None stands for all ranks of a lane."""
    lanes = replay.program.lanes
    if len(plan.workers) > DEVICES:
        return [(number, None) for number in range(len(lanes))]
    ranks = [(rank, number) for number, lane in enumerate(lanes) for rank in lane.ranks]
    return [(number, rank) for rank, number in sorted(ranks)]


def _name(lane: Lane, plan: Plan, rank: int | None) -> str:
    if rank is None:
        first = plan.workers[lane.ranks[0]]
        return f"{len(lane.ranks)} x {first.device_class}: {first.device} and those alike"
    worker = plan.workers[rank]
    return f"{worker.host}: {worker.device} ({worker.device_class})"


def _stream(event: Event) -> Stream:
    if event.kind in COMPUTING or event.kind == "overhead":
        return "compute"
    return "communication" if event.lane is None else "host copies"


def _span(replay: Replay, event: Event, process: str, *, critical: bool) -> Span:
    unit = replay.program.unit(event.call)
    return Span(
        name=event.kind if event.kind in ("optimizer", "overhead") else f"{event.kind} {unit}",
        category=event.kind,
        process=process,
        thread=_stream(event),
        start_s=event.start,
        seconds=event.seconds,
        args={"unit": unit, "micro_batches": list(event.micro_batches), "critical": critical},
    )
