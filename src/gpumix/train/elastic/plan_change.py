"""Plan changes of a run as events: each device's part before and now.

Recorded for a start by another plan, and for a rebalance while the run trains. The texts for all
viewers of a run are made here too. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError
from gpumix.schema.files import iterate_lines, open_for_reading
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.units import format_count, show_seconds
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import RunEvent
from gpumix.train.run_log.run_id import is_newer_than_run_id
from gpumix.train.run_manifest import RunRecord

EVENT = "plan"
_MARK = f'"{EVENT}"'.encode()  # in the line of an event
BEFORE = "_before"  # suffix of fields
ALWAYS = ("samples", "shares")  # reported even if unchanged
MOST_LISTED_DEVICES = 6  # devices listed in a text


@dataclass(frozen=True)
class PlanParts:
    """Each device's part of a plan; all by device, except the first two.

    `shares` are fractions of the state divided by a stage's workers, empty at ZeRO stage 0;
    `stages` count from 1; `blocks` are the unit calls of all stages of a device. `devices` are
    descriptions, where known.
    """

    strategy: str
    zero_stage: int
    samples: Mapping[str, int]
    shares: Mapping[str, float]
    micro_batches: Mapping[str, int]
    modes: Mapping[str, str]
    stages: Mapping[str, list[int]]
    blocks: Mapping[str, int]
    devices: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster | None = None) -> PlanParts:
        placed: dict[str, list[tuple[int, Stage, Worker]]] = {}
        for number, stage in enumerate(plan.stages, 1):
            for worker in stage.workers:
                placed.setdefault(worker.device, []).append((number, stage, worker))
        first = {device: own[0][2] for device, own in placed.items()}
        shares = {
            device: fmean(stage.stored_by(worker) for _, stage, worker in own)
            for device, own in placed.items()
        }
        return cls(
            strategy=plan.strategy,
            zero_stage=plan.zero_stage,
            samples={device: worker.samples for device, worker in first.items()},
            shares=shares if plan.zero_stage else {},
            micro_batches={device: worker.micro_batch for device, worker in first.items()},
            modes={device: worker.mode.describe() for device, worker in first.items()},
            stages={device: [number for number, _, _ in own] for device, own in placed.items()},
            blocks={d: sum(len(stage.units) for _, stage, _ in own) for d, own in placed.items()},
            devices={} if cluster is None else _described(cluster, placed),
        )


def _described(cluster: Cluster, devices: Iterable[str]) -> dict[str, str]:
    there = {one.id: cluster.class_named(one.device_class) for one in cluster.devices}
    return {device: there[device].describe() for device in devices if device in there}


def diff_plan_parts(before: PlanParts, after: PlanParts) -> dict[str, Any]:
    """Return the event's fields: changed values, new and old; empty without changes."""
    both = before.devices.keys() & after.devices.keys()
    before, after = (
        replace(one, devices={name: what for name, what in one.devices.items() if name in both})
        for one in (before, after)
    )
    if before == after:
        return {}
    old = asdict(before)
    fields: dict[str, Any] = {}
    for name, value in asdict(after).items():
        if name in ALWAYS or value != old[name]:
            fields |= {name: value, f"{name}{BEFORE}": old[name]}
    return fields


def make_start_event(before: PlanParts, now: PlanParts, why: str) -> RunEvent | None:
    """Return the event of a start by a plan unlike `before`; None if equal."""
    fields = diff_plan_parts(before, now)
    return RunEvent(EVENT, {"why": why, "live": False} | fields, "") if fields else None


def make_rebalance_event(
    before: Plan,
    after: Plan,
    why: str,
    *,
    what: str,
    before_s: float,
    after_s: float,
    moving_s: float | None = None,
) -> RunEvent:
    """Return the event of a rebalance while the run trains.

    Args:
        what: the work timed: `before_s` per step until now, `after_s` expected.
        moving_s: time to move state, if state moves.
    """
    fields = {
        "why": why,
        "live": True,
        **diff_plan_parts(PlanParts.of(before), PlanParts.of(after)),
        "expected_s": after_s,
        "expected_before_s": before_s,
    }
    if moving_s is not None:
        fields["moving_s"] = moving_s
    expected = f"{what} is to take {show_seconds(after_s)} instead of {show_seconds(before_s)}"
    return RunEvent(EVENT, fields, f"split anew, for {why}: {describe_changes(fields)}; {expected}")


def load_parts_in_force(folder: Path, *, fresh: bool = False) -> PlanParts | None:
    """Return the parts of a run's last plan; see `load_plan_in_force`."""
    plan = load_plan_in_force(folder, fresh=fresh)
    return None if plan is None else PlanParts.of(plan, _devices_of(folder))


def load_plan_in_force(folder: Path, *, fresh: bool = False) -> Plan | None:
    """Return a run's last plan, with later rebalances applied; None without a plan.

    Args:
        fresh: the run did not resume, maybe in a folder with another run's plan and record.
    """
    plan_file, record = folder / run_files.PLAN, folder / run_files.METRICS
    if fresh and not is_newer_than_run_id(plan_file):
        return None
    try:
        plan = Plan.load(plan_file)
    except InputError:  # no plan, or of another version
        return None
    told = _newest_first(record) if not fresh or is_newer_than_run_id(record) else iter(())
    newest = next(told, None)
    return plan if newest is None else apply_split(plan, newest)


def _devices_of(folder: Path) -> Cluster | None:
    """Return the cluster named by the job of the run's last start; None if unnamed."""
    try:
        named = RunRecord.load(folder / run_files.RUN).job.get("cluster")
        return Cluster.model_validate(named) if isinstance(named, dict) else None
    except (InputError, ValidationError):
        return None


def apply_split(plan: Plan, told: Mapping[str, Any]) -> Plan:
    """Apply the samples and shares of an event; return the plan unchanged if the event is of
    another plan. The prediction stays the original plan's."""

    def now(worker: Worker, stage: Stage) -> dict[str, Any]:
        device = worker.device
        samples = told["samples"][device]
        share = worker.state_share
        if plan.zero_stage:
            share = told["shares"][device] * stage.tensor / worker.parts
        most = told.get("micro_batches", {}).get(device, worker.micro_batch)
        changed = {"samples": samples, "micro_batch": min(most, samples), "state_share": share}
        return worker.model_dump() | changed

    with suppress(LookupError, TypeError, AttributeError, ValueError):
        stages = [
            stage.model_dump() | {"workers": [now(worker, stage) for worker in stage.workers]}
            for stage in plan.stages
        ]
        return Plan.model_validate(plan.model_dump() | {"stages": stages})
    return plan


def _lines(path: Path) -> list[str]:
    """Return the lines with possible events; the record of a long run has many more."""
    with open_for_reading(path) as stream:
        return [line.decode(errors="replace") for line in iterate_lines(stream) if _MARK in line]


def _newest_first(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a record, newest first; the last line may be cut short."""
    with suppress(OSError):
        for line in reversed(_lines(path)):
            with suppress(ValueError, LookupError, TypeError):
                told = json.loads(line)
                if told["event"] == EVENT:
                    yield told


# -- words -----------------------------------------------------------------------------------------


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _format_percent(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, float | int) else str(value)


# Fields in order of appearance, with labels and formats.
FIELD_FORMATS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "strategy": ("strategy", _plain),
    "zero_stage": ("ZeRO stage", _plain),
    "stages": ("stages", _plain),
    "blocks": ("blocks", _plain),
    "samples": ("samples", _plain),
    "shares": ("of the state", _format_percent),
    "micro_batches": ("largest micro-batches", _plain),
    "modes": ("modes", _plain),
    "devices": ("devices", _plain),
}


def describe_changes(told: Mapping[str, Any]) -> str:
    """Describe the changes of an event; of many devices only a few."""
    found = []
    for name, (what, shown) in FIELD_FORMATS.items():
        before, after = told.get(f"{name}{BEFORE}"), told.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changed = list(_devices(before, after, shown))
            if changed:
                found.append(f"{what}: {_listed(changed)}")
        elif all(isinstance(one, str | int) for one in (before, after)) and before != after:
            found.append(f"{what} {shown(before)} to {shown(after)}")
    return "; ".join(found)


def describe_device_changes(before: Plan, there: Cluster, taking: Cluster) -> str:
    """Describe devices joined or gone since the plan `before`; empty without changes.

    Args:
        taking: the devices taking part, of all `there`.
    """
    had = {worker.device: worker.host for worker in before.workers}
    now = {device.id for device in there.devices}
    new = [device for device in taking.in_rank_order() if device.id not in had]
    joined = [f"{device.id} on host {device.host}" for device in new]
    gone = [f"{device} on host {host}" for device, host in had.items() if device not in now]
    found = [f"{format_count(len(joined), 'device')} joined: {_listed(joined)}"] if joined else []
    found += [f"no longer there: {_listed(gone)}"] if gone else []
    return "; ".join(found)


def _listed(told: Sequence[str]) -> str:
    more = f" and {len(told) - MOST_LISTED_DEVICES} more" if len(told) > MOST_LISTED_DEVICES else ""
    return f"{', '.join(told[:MOST_LISTED_DEVICES])}{more}"


def _devices(
    before: Mapping[str, Any], after: Mapping[str, Any], shown: Callable[[Any], str]
) -> Iterator[str]:
    """Yield the devices with a visibly changed value; "none" if not in the plan."""
    for device in dict.fromkeys([*before, *after]):
        values = [shown(all_[device]) if device in all_ else "none" for all_ in (before, after)]
        if values[0] != values[1]:
            yield f"{device} {values[0]} to {values[1]}"
