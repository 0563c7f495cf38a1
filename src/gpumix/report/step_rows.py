"""Rows of bars for one step: simulated from the plan, or traced in the run.

In large clusters, one device represents all devices of its class and stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.step_trace import CompleteEvent, MetadataEvent, Trace, format_process_name
from gpumix.schema.profile.profile import Profile
from gpumix.simulate.events import simulate
from gpumix.simulate.replay import Replay

MOST_ROWS = 16
MOST_BARS = 500  # of a row; longer rows are drawn with the dominant kind at each position
THINNED_POSITIONS = 600
MOST_SINGLE_DEVICES = 12  # maximum for showing every device
COMMUNICATION = {"gather", "regather", "reduce", "meet", "send"}
COPIES = {"copy to host", "copy from host"}
WAITING = "waiting"


@dataclass(frozen=True)
class Bar:
    """An activity of a device, or a wait if `kind` is "waiting"; `name` is the readable cause."""

    kind: str
    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class DeviceBars:
    """A device representing `others` equal devices, with bars of work and waits, and of sends."""

    device: str
    device_class: str
    others: int
    computes: tuple[Bar, ...]
    sends: tuple[Bar, ...]


@dataclass(frozen=True)
class StepRows:
    rows: tuple[DeviceBars, ...]
    step_s: float
    more: int = 0  # rows not shown


def simulate_rows(profile: Profile, plan: Plan) -> StepRows | None:
    """Simulate a step of the plan; return None if the profile lacks data."""
    try:
        replay = simulate(profile, plan)
    except InputError:
        return None
    chosen, more = _choose_ranks(plan)
    lane_of = {rank: number for number, lane in enumerate(replay.lanes) for rank in lane.ranks}
    workers = plan.workers
    rows = [
        _row(workers[rank].device, workers[rank].device_class, others, _bars(replay, lane_of[rank]))
        for rank, others in chosen
    ]
    return StepRows(tuple(rows), replay.step_s, more)


def make_traced_rows(trace: Trace, plan: Plan) -> StepRows:
    """Return a measured step for the same choice of devices, as far as traced."""
    names = {
        one.pid: str(one.args.get("name", ""))
        for one in trace.traceEvents
        if isinstance(one, MetadataEvent) and one.name == "process_name"
    }
    bars: dict[str, list[Bar]] = {}
    for one in trace.traceEvents:
        if isinstance(one, CompleteEvent):
            start_s, end_s = one.ts / 1e6, (one.ts + one.dur) / 1e6
            bar = Bar(one.cat, one.name, start_s, end_s)
            bars.setdefault(names.get(one.pid, ""), []).append(bar)
    chosen, more = _choose_ranks(plan)
    rows = []
    for rank, others in chosen:
        worker = plan.workers[rank]
        found = bars.get(format_process_name(worker, emulated=plan.emulated), [])
        if found:
            rows.append(_row(worker.device, worker.device_class, others, found))
    ends = [bar.end_s for found in bars.values() for bar in found]
    return StepRows(tuple(rows), max(ends, default=0.0), more)


def _choose_ranks(plan: Plan) -> tuple[list[tuple[int, int]], int]:
    """Return the chosen ranks, each with the number of further ranks represented, and the number of
    groups omitted."""
    workers = plan.workers
    if len(workers) <= MOST_SINGLE_DEVICES:
        return [(rank, 0) for rank in range(len(workers))], 0
    stages: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        for worker in stage.workers:
            stages.setdefault(worker.device, []).append(number)
    keys = [(tuple(stages[worker.device]), worker.device_class) for worker in workers]
    alike = Counter(keys)
    first: dict[object, int] = {}
    for rank, key in enumerate(keys):
        first.setdefault(key, rank)
    found = [(rank, alike[keys[rank]] - 1) for rank in first.values()]
    return found[:MOST_ROWS], max(0, len(found) - MOST_ROWS)


def _bars(replay: Replay, lane: int) -> list[Bar]:
    """Return the activities and waits of a lane's ranks."""
    done = [
        Bar(one.kind, f"{one.kind} {replay.unit(one.call)}", one.start, one.end)
        for one in replay.events
        if one.lane in (None, lane) and one.kind != "overhead"
    ]
    idle = (Bar(WAITING, one.cause, one.start, one.end) for one in replay.idle if one.lane == lane)
    return [*done, *idle]


def _row(device: str, device_class: str, others: int, bars: Iterable[Bar]) -> DeviceBars:
    ordered = sorted(bars, key=lambda bar: bar.start_s)
    sends = [bar for bar in ordered if bar.kind in COMMUNICATION | COPIES]
    computes = [bar for bar in ordered if bar.kind not in COMMUNICATION | COPIES]
    return DeviceBars(device, device_class, others, _thin_bars(computes), _thin_bars(sends))


def _thin_bars(bars: Sequence[Bar]) -> tuple[Bar, ...]:
    """Reduce the bars to the dominant kind at each position."""
    if len(bars) <= MOST_BARS:
        return tuple(bars)
    begin, end = bars[0].start_s, max(bar.end_s for bar in bars)
    width = (end - begin) / THINNED_POSITIONS or 1.0
    filled: list[dict[str, float]] = [{} for _ in range(THINNED_POSITIONS)]
    for bar in bars:
        first, last = (int((time - begin) / width) for time in (bar.start_s, bar.end_s))
        for place in range(first, min(last, THINNED_POSITIONS - 1) + 1):
            left, right = begin + place * width, begin + (place + 1) * width
            inside = max(0.0, min(right, bar.end_s) - max(left, bar.start_s))
            filled[place][bar.kind] = filled[place].get(bar.kind, 0.0) + inside
    found: list[Bar] = []
    for place, kinds in enumerate(filled):
        if not kinds:
            continue
        kind = max(kinds, key=kinds.__getitem__)
        left, right = begin + place * width, begin + (place + 1) * width
        if found and found[-1].kind == kind and abs(found[-1].end_s - left) < width / 2:
            found[-1] = replace(found[-1], end_s=right)
        else:
            found.append(Bar(kind, kind, left, right))
    return tuple(found)
