"""Plans to replay, and their bounds by other means than events."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from gpumix.cost.step_time import can_predict_mode
from gpumix.planner.common.sharding_setting import make_setting
from gpumix.planner.common.strategy import DevicePart, PlanRequest, build_plan, list_devices_by_rank
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, Mode
from gpumix.schema.profile.profile import ROOT, Profile, UnitTimes
from gpumix.simulate.events import ReplayedProgram
from gpumix.simulate.program import RankTask
from gpumix.simulate.replay import ROOT_AFTER_CALL, ROOT_BEFORE_CALL, ROOT_CALL, Event
from helpers.plans.profiles import FREE, Card, Network, block, curve, line, profile, root


def cards(
    speeds: Sequence[float] = (1.0, 2.0), calls: int = 3, network: Network | None = None, **options
) -> Profile:
    """One device a class, of so many seconds a sample and call forward, three times that
    backward; half and all of it for the root."""
    return profile(
        [
            Card(
                f"c{i}",
                1,
                10**9,
                {
                    "block": UnitTimes(forward=line(s), backward=line(3 * s), gradient=line(2 * s)),
                    ROOT: UnitTimes(forward=line(s / 2), backward=line(s)),
                },
                optimizer_s_per_element=s * 1e-4,
                host_copy=curve(1e-3, 1e-3 * 2**30, sizes=(1, 2**30)),
            )
            for i, s in enumerate(speeds)
        ],
        calls=("block",) * calls,
        kinds=[block(saved=FREE)],
        root_unit=root(500),
        network=network,
        **options,
    )


def wire(gather_s: float, reduce_s: float, contention: float = 0.0) -> Network:
    """Collectives of so many seconds, whatever their size."""
    gather, reduce = (curve(s, s, sizes=(1, 2**40)) for s in (gather_s, reduce_s))
    return Network({"broadcast": gather}, {"all_to_all": reduce}, contention=contention)


def plan_by_hand(
    measured: Profile,
    samples: Sequence[int],
    *,
    micro_batch: int = 10**6,
    shares: Sequence[float] = (),
    zero_stage: int = 3,
    modes: Sequence[Mode] = (),
) -> Plan:
    """So many samples on each device; equal shares and plain modes if none are given."""
    devices = list_devices_by_rank(measured, PlanRequest(global_batch=1))
    shares = shares or [1 / len(devices)] * len(devices)
    modes = modes or [PLAIN] * len(devices)
    parts = {
        device.id: DevicePart(n, min(n, micro_batch), share, mode)
        for device, n, share, mode in zip(devices, samples, shares, modes, strict=True)
    }
    setting = make_setting(measured, devices, zero_stage=zero_stage)
    return build_plan(setting, strategy="by hand", global_batch=sum(samples), parts=parts)


@st.composite
def any_plans(draw: st.DrawFn, measured: Profile, stages: Sequence[int] = (0, 1, 2, 3)) -> Plan:
    """Any stage, and on each device any samples, micro-batches, share and mode."""
    devices = list_devices_by_rank(measured, PlanRequest(global_batch=1))
    zero_stage = draw(st.sampled_from(stages))
    samples = draw(
        st.lists(st.integers(0, 9), min_size=len(devices), max_size=len(devices)).filter(any)
    )
    weights = draw(
        st.lists(st.integers(0, 5), min_size=len(devices), max_size=len(devices)).filter(any)
    )
    parts = {}
    for device, n, weight in zip(devices, samples, weights):
        modes = [
            m
            for m in EVERYTHING.modes(zero_stage)
            if can_predict_mode(measured, device.device_class, m)
        ]
        micro = draw(st.integers(1, n)) if n else 0
        parts[device.id] = DevicePart(n, micro, weight / sum(weights), draw(st.sampled_from(modes)))
    setting = make_setting(measured, devices, zero_stage=zero_stage)
    return build_plan(setting, strategy="random", global_batch=sum(samples), parts=parts)


def lockstep_s(replay: ReplayedProgram) -> float:
    """Seconds if all ranks met after every task and every collective beside it: no rank gets ahead,
    and nothing is hidden but within one call. No contention."""
    program = replay.program
    longest: dict[tuple[str, int], float] = {}
    for lane in program.lanes:
        for task in lane.tasks:
            key = (task.kind, task.call)
            longest[key] = max(longest.get(key, 0.0), task.seconds, task.copied_s)
    moved = {(c.kind, c.call): c.seconds for c in program.collectives}
    total = program.overhead_s
    total += moved.get(("gather", ROOT_CALL), 0.0) + moved.get(("gather", ROOT_BEFORE_CALL), 0.0)
    last = len(program.calls) - 1
    for (kind, call), seconds in longest.items():
        total += max(seconds, sum(moved.get(move, 0.0) for move in _beside(kind, call, last)))
    ends = (("reduce", 0), ("reduce", ROOT_CALL), ("reduce", ROOT_BEFORE_CALL))
    return total + sum(moved.get(move, 0.0) for move in ends)


def _beside(kind: str, call: int, last: int) -> list[tuple[str, int]]:
    if kind == "forward":
        following = (
            ROOT_AFTER_CALL if call == last else call + 1
        )  # the root's number is one below the first
        return [("gather", following)]
    if kind == "backward":
        following = ROOT_AFTER_CALL if call == last else call + 1
        return [("reduce", following)] + ([("regather", call - 1)] if call else [])
    return []


def head_s(replay: ReplayedProgram) -> float:
    """What a rank may do before it waits for others that are not through their forward: the
    longest of the heads with the last call's backward, and what moves beside that."""
    tasks: list[RankTask] = [task for lane in replay.program.lanes for task in lane.tasks]
    last = len(replay.program.calls) - 1
    heads = [task.seconds for task in tasks if task.kind == "head"]
    of_last = [t.seconds for t in tasks if (t.kind, t.call) == ("backward", last)]
    beside = [("reduce", ROOT_AFTER_CALL), ("regather", last - 1)]
    moved = (c.seconds for c in replay.program.collectives if (c.kind, c.call) in beside)
    return max(heads) + max(of_last) + sum(moved)


def on_stream(replay: ReplayedProgram, lane: int) -> dict[str, list[Event]]:
    """The events of a lane by stream, in order of time."""
    found: dict[str, list[Event]] = {"compute": [], "copies": [], "collectives": []}
    for event in replay.events:
        if event.lane == lane:
            copied = event.kind.startswith("copy")
            found["copies" if copied else "compute"].append(event)
        elif event.lane is None:
            found["collectives"].append(event)
    return {name: sorted(events, key=lambda e: e.start) for name, events in found.items()}
