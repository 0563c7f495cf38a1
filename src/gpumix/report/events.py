"""Events of a run in words: step, time, description and reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from gpumix.report.run import Run
from gpumix.schema.units import show_seconds
from gpumix.train.elastic.plan_change import describe_changes
from gpumix.train.run_figures.history import HistoryEvent, parse_number
from gpumix.train.run_figures.words import format_progress

ENDED_EARLY = "Ended by the script"

Weight = Literal["note", "change", "trouble"]


@dataclass(frozen=True)
class ShownEvent:
    """An event as displayed; `weight` ranks its importance."""

    event: str
    step: int
    time: float | None
    what: str
    why: str
    weight: Weight = "note"


def list_events(run: Run) -> tuple[ShownEvent, ...]:
    """Return all events of a run, including its end, in chronological order."""
    time, placed = 0.0, []
    for one in (*map(_describe_event, run.history.events), *_describe_end(run)):
        time = time if one.time is None else one.time
        placed.append((time, one))
    return tuple(one for _, one in sorted(placed, key=lambda place: place[0]))


def _describe_event(one: HistoryEvent) -> ShownEvent:
    if one.event in DESCRIBERS:
        what, why, weight = DESCRIBERS[one.event](one)
    else:
        fields = (f"{k} {v}" for k, v in one.told.items() if k not in ("event", "step", "time"))
        what, why, weight = one.event, ", ".join(fields), "note"
    return ShownEvent(one.event, one.step, one.time, what, why, weight)


def _describe_end(run: Run) -> list[ShownEvent]:
    progress = run.progress
    words: dict[str, tuple[str, Weight]] = {
        "failed": ("The run failed", "trouble"),
        "interrupted": ("The run was stopped", "change"),
        "restarting": ("The run is restarting", "trouble"),
        "finished": ("All steps are done", "note"),
    }
    if progress.state not in words:
        return []
    what, weight = words[progress.state]
    why = "" if progress.state == "finished" else progress.why
    if progress.ended_early:
        what, why = ENDED_EARLY, f"after {format_progress(progress.step, progress.steps)}"
    return [ShownEvent(progress.state, progress.step, progress.heard_at, what, why, weight)]


_Words = tuple[str, str, Weight]


def _restart(one: HistoryEvent) -> _Words:
    took = one.number("seconds")
    seconds = "" if took is None else f", training after {show_seconds(took)}"
    since = one.number("resumed_from")
    what = "Restarted" if since is None else f"Restarted from step {int(since)}"
    return f"{what}{seconds}", _join_sentences(one.text("why"), one.text("decided")), "trouble"


def _resume(one: HistoryEvent) -> _Words:
    return f"Resumed after step {one.step:,}", "", "note"


def _checkpoint(one: HistoryEvent) -> _Words:
    seconds, stalled = one.number("seconds"), one.number("stalled_s")
    took = "" if seconds is None else f"written in {show_seconds(seconds)}"
    still = "" if stalled is None else f"training paused for {show_seconds(stalled)}"
    name = PurePath(one.text("path")).name
    return f"Checkpoint {name}".strip(), ", ".join(filter(None, (took, still))), "note"


def _describe_late_checkpoint(one: HistoryEvent) -> _Words:
    why = "the previous one is still being written: the disk is slower than the interval asks for"
    return "Checkpoint delayed", why, "trouble"


def _copies(one: HistoryEvent) -> _Words:
    steps = one.number("every_steps")
    every = "" if not steps else "after every step" if steps == 1 else f"every {steps:.0f} steps"
    return "Training state is copied into host memory", every, "note"


def _plan(one: HistoryEvent) -> _Words:
    what = "Rebalanced" if one.told.get("live") is True else "New plan"
    return what, _join_sentences(one.text("why"), describe_changes(one.told)), "change"


def _losses(one: HistoryEvent) -> _Words:
    return "Rule for adding up losses of micro-batches", one.text("rule"), "note"


def _rebalanced(one: HistoryEvent) -> _Words:
    now, before = one.number("step_s"), one.number("step_before_s")
    if now is None or before is None:
        return "Effect of rebalancing", "", "note"
    why = f"a step takes {show_seconds(now)}, and took {show_seconds(before)} before"
    return "Effect of rebalancing", why, "note"


def _describe_starvation(one: HistoryEvent) -> _Words:
    told = one.told.get("ranks")
    parts = []
    for rank in told if isinstance(told, list) else ():
        share = parse_number(rank.get("share")) if isinstance(rank, Mapping) else None
        if share is not None:
            limit = f" ({rank['limit']})" if rank.get("limit") else ""
            parts.append(f"{rank.get('device', '')} {share:.0%} of each step{limit}")
    return "GPUs wait for data", ", ".join(parts), "trouble"


def _describe_norm_spike(one: HistoryEvent) -> _Words:
    times, others = one.number("times"), one.number("others")
    size = "not finite" if times is None else f"{times:.0f} times as large as usual"
    beside = "" if others is None else f"; on other GPUs {others:.1f} times"
    what = f"Unusual gradient norm on {one.text('device') or 'a GPU'}"
    return what, f"it was {size}{beside}: bad samples, or wrong results", "trouble"


def _replay(one: HistoryEvent) -> _Words:
    devices = one.told.get("devices")
    names = " and ".join(map(str, devices)) if isinstance(devices, list) else "a GPU"
    wrong = "computes wrong results"
    who = f"{names} {wrong}" if one.told.get("sure") else f"One of {names} {wrong}"
    off = one.number("deviation")
    why = "" if off is None else f"its gradient of the same sample is off by {off:.0%}"
    where = f", from {one.text('where')} on in the backward pass" if one.text("where") else ""
    return who, f"{why}{where}", "trouble"


def _clocks(one: HistoryEvent) -> _Words:
    now, measured = one.number("sm_mhz"), one.number("measured_sm_mhz")
    what = f"{one.text('device') or 'A GPU'} runs at another clock rate than when profiled"
    if now is None or measured is None:
        return what, "", "trouble"
    return what, f"{now:.0f} MHz, not {measured:.0f}: planned times are off by as much", "trouble"


def _compared(one: HistoryEvent) -> _Words:
    step_s, steps = one.number("step_s"), one.number("steps")
    took = "" if step_s is None else f"{show_seconds(step_s)} a step"
    over = "" if steps is None else f", over {int(steps)} steps on the same GPUs"
    return f"Strategy {one.text('strategy')} measured", f"{took}{over}", "note"


def _join_sentences(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


DESCRIBERS: dict[str, Callable[[HistoryEvent], _Words]] = {
    "restart": _restart,
    "resume": _resume,
    "checkpoint": _checkpoint,
    "checkpoint-late": _describe_late_checkpoint,
    "copies": _copies,
    "plan": _plan,
    "rebalanced": _rebalanced,
    "input-bound": _describe_starvation,
    "norm-spike": _describe_norm_spike,
    "replay": _replay,
    "clocks": _clocks,
    "compared": _compared,
    "losses": _losses,
}
