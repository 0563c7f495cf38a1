"""What became of a run's plan, as an event of its record: what each device had before and has now.

Told of a start by another plan, and of a split anew while the run trains. Its words are made here
too, for all who show a run. Nothing here imports torch.
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

from gpumix.spec.cluster import Cluster
from gpumix.spec.errors import InputError
from gpumix.spec.files import lines_in, opened
from gpumix.spec.plan import Plan
from gpumix.spec.stage import Stage, Worker
from gpumix.spec.units import plural, show_seconds
from gpumix.train import run_files
from gpumix.train.metrics import Told
from gpumix.train.run_id import is_later
from gpumix.train.run_record import RunRecord

EVENT = "plan"
_MARK = f'"{EVENT}"'.encode()  # in its line
BEFORE = "_before"  # behind the names of fields
ALWAYS = ("samples", "shares")  # that are told where they stay, too
MOST = 6  # devices that words are made of, one by one


@dataclass(frozen=True)
class Parts:
    """What each device has of a plan: all by device, but for the first two.

    `shares` are parts of the state that a stage's workers divide, without any at ZeRO stage 0;
    `stages` are counted from 1, `blocks` are the unit calls of all of them. `devices` says what
    they are, where that is known.
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
    def of(cls, plan: Plan, cluster: Cluster | None = None) -> Parts:
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


def change(before: Parts, after: Parts) -> dict[str, Any]:
    """The event's fields: what differs, and what it was; nothing if nothing does."""
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


def started(before: Parts, now: Parts, why: str) -> Told | None:
    """What to tell of a start by what there is `now` in place of what the run had `before`; None if
    it is the same."""
    fields = change(before, now)
    return Told(EVENT, {"why": why, "live": False} | fields, "") if fields else None


def dealt_anew(
    before: Plan,
    after: Plan,
    why: str,
    *,
    what: str,
    before_s: float,
    after_s: float,
    moving_s: float | None = None,
) -> Told:
    """What to tell of a split anew while the run trains.

    Args:
        what: takes `before_s` in a step by the plan until now, and is to take `after_s`.
        moving_s: what it takes to move state, if that moves.
    """
    fields = {
        "why": why,
        "live": True,
        **change(Parts.of(before), Parts.of(after)),
        "expected_s": after_s,
        "expected_before_s": before_s,
    }
    if moving_s is not None:
        fields["moving_s"] = moving_s
    expected = f"{what} is to take {show_seconds(after_s)} instead of {show_seconds(before_s)}"
    return Told(EVENT, fields, f"split anew, for {why}: {in_words(fields)}; {expected}")


def in_force(folder: Path, *, fresh: bool = False) -> Parts | None:
    """By what a run trained last; see `plan_in_force`."""
    plan = plan_in_force(folder, fresh=fresh)
    return None if plan is None else Parts.of(plan, _devices_of(folder))


def plan_in_force(folder: Path, *, fresh: bool = False) -> Plan | None:
    """By what a run trained last: its plan, and how it was split anew since. None without any.

    Args:
        fresh: it was begun anew, maybe where another run had left a plan and a record.
    """
    plan_file, record = folder / run_files.PLAN, folder / run_files.METRICS
    if fresh and not is_later(plan_file):
        return None
    try:
        plan = Plan.load(plan_file)
    except InputError:  # there is none, or none of this version
        return None
    told = _newest_first(record) if not fresh or is_later(record) else iter(())
    newest = next(told, None)
    return plan if newest is None else split_anew(plan, newest)


def _devices_of(folder: Path) -> Cluster | None:
    """Those that the job of the run's last start named; None if it named none."""
    try:
        named = RunRecord.load(folder / run_files.RUN).job.get("cluster")
        return Cluster.model_validate(named) if isinstance(named, dict) else None
    except (InputError, ValidationError):
        return None


def split_anew(plan: Plan, told: Mapping[str, Any]) -> Plan:
    """The plan with the samples and shares that an event tells; as it is, if they are of another.
    What is predicted stays that of the plan as it was."""

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
    """Those that may tell of it; a run of weeks has many others."""
    with opened(path) as stream:
        return [line.decode(errors="replace") for line in lines_in(stream) if _MARK in line]


def _newest_first(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a record; its last line may have been cut short."""
    with suppress(OSError):
        for line in reversed(_lines(path)):
            with suppress(ValueError, LookupError, TypeError):
                told = json.loads(line)
                if told["event"] == EVENT:
                    yield told


# -- words -----------------------------------------------------------------------------------------


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _part(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, float | int) else str(value)


# The fields in the order in which they are told, what they are called, and how values are shown.
WORDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "strategy": ("strategy", _plain),
    "zero_stage": ("ZeRO stage", _plain),
    "stages": ("stages", _plain),
    "blocks": ("blocks", _plain),
    "samples": ("samples", _plain),
    "shares": ("of the state", _part),
    "micro_batches": ("largest micro-batches", _plain),
    "modes": ("modes", _plain),
    "devices": ("devices", _plain),
}


def in_words(told: Mapping[str, Any]) -> str:
    """What an event says that has changed; of many devices only some."""
    found = []
    for name, (what, shown) in WORDS.items():
        before, after = told.get(f"{name}{BEFORE}"), told.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changed = list(_devices(before, after, shown))
            if changed:
                found.append(f"{what}: {_listed(changed)}")
        elif all(isinstance(one, str | int) for one in (before, after)) and before != after:
            found.append(f"{what} {shown(before)} to {shown(after)}")
    return "; ".join(found)


def devices_in_words(before: Plan, there: Cluster, taking: Cluster) -> str:
    """Which devices have joined since a run trained by the plan `before`, and which have gone;
    empty if none.

    Args:
        taking: those that take part, of all that are `there`.
    """
    had = {worker.device: worker.host for worker in before.workers}
    now = {device.id for device in there.devices}
    new = [device for device in taking.in_rank_order() if device.id not in had]
    joined = [f"{device.id} on host {device.host}" for device in new]
    gone = [f"{device} on host {host}" for device, host in had.items() if device not in now]
    found = [f"{plural(len(joined), 'device')} joined: {_listed(joined)}"] if joined else []
    found += [f"no longer there: {_listed(gone)}"] if gone else []
    return "; ".join(found)


def _listed(told: Sequence[str]) -> str:
    more = f" and {len(told) - MOST} more" if len(told) > MOST else ""
    return f"{', '.join(told[:MOST])}{more}"


def _devices(
    before: Mapping[str, Any], after: Mapping[str, Any], shown: Callable[[Any], str]
) -> Iterator[str]:
    """Each whose value has changed as it is shown; who has none is not in the plan."""
    for device in dict.fromkeys([*before, *after]):
        values = [shown(all_[device]) if device in all_ else "none" for all_ in (before, after)]
        if values[0] != values[1]:
            yield f"{device} {values[0]} to {values[1]}"
