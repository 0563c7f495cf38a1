"""Conversion of a line of `metrics.jsonl` to numbers and events, by the names in trackers.

Pure, and the only place that knows both formats; docs/trackers.md lists the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpumix.integrations.trackers.tracker import Numbers, Series, TrackedEvent
from gpumix.schema.units import show_seconds
from gpumix.train.elastic.plan_change import describe_changes as plan_in_words
from gpumix.train.run_figures.history import RUN_FIGURES

# With more devices only classes are reported: trackers cannot show as many curves.
MAX_DEVICES = 64

# A line's key, and the reported name.
STEP_NAMES = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "gradient_norm": "grad_norm",
    "step_s": "step_s",
    "tokens_per_s": "tokens_per_s",
    "tokens": "tokens",
}
_SHARED_NAMES = {
    "busy_share": "busy",
    "mfu": "mfu",
    "hfu": "hfu",
    "tokens_per_s": "tokens_per_s",
    "peak_bytes": "peak_bytes",
    "reserved_bytes": "reserved_bytes",
    "retries": "retries",
}
CLASS_NAMES = {**_SHARED_NAMES, "planned_peak_bytes": "planned_peak_bytes", "samples": "samples"}
DEVICE_NAMES = {**_SHARED_NAMES, "sent_bytes": "sent_bytes"}
# Figures of the run so far, as in every view of it.
RUN_NAMES = {
    "tokens_per_s": "tokens_per_s",
    "step_s": "step_s",
    "slower_than_planned": "slower_than_planned",
    "remaining_s": "remaining_s",
}
CHECKPOINT_NAMES = {"seconds": "seconds", "stalled_s": "stalled_s"}
NUMERIC_KINDS = ("step", "classes", "ranks", "evaluation", RUN_FIGURES)
"""Kinds of lines with numbers only; all others are events."""


def convert_line(line: Mapping[str, Any]) -> Iterator[Numbers | TrackedEvent]:
    """Yield the numbers and the event of a line; nothing without known numbers."""
    kind, step, time_s = str(line["event"]), int(line["step"]), float(line["time"])
    values = dict(_values(kind, line))
    if values:
        yield Numbers(step, time_s, values)
    if kind not in NUMERIC_KINDS:
        yield TrackedEvent(step, time_s, kind, describe_event(line))


def _values(kind: str, line: Mapping[str, Any]) -> Iterator[tuple[Series, float]]:
    if kind == "step":
        yield from _select_known(line, "train", STEP_NAMES)
    elif kind == "evaluation":
        yield from _select_known(line, "eval", {"loss": "loss"})
    elif kind == "classes":
        for one in line["classes"]:
            yield from _select_known(one, "class", CLASS_NAMES, of=one["device_class"])
    elif kind == "ranks" and len(line["ranks"]) <= MAX_DEVICES:
        for one in line["ranks"]:
            yield from _select_known(one, "device", DEVICE_NAMES, of=one["device"])
    elif kind == RUN_FIGURES:
        yield from _select_known(line, "run", RUN_NAMES)
    elif kind == "checkpoint":
        yield from _select_known(line, "checkpoint", CHECKPOINT_NAMES)


def _select_known(
    holder: Mapping[str, Any], group: str, names: Mapping[str, str], *, of: str = ""
) -> Iterator[tuple[Series, float]]:
    """Yield the known numbers, and the shares of a step's time."""
    for key, what in names.items():
        if holder.get(key) is not None:
            yield Series(group, what, of), float(holder[key])
    for kind, part in (holder.get("shares") or {}).items():
        yield Series(group, f"share/{kind}", of), float(part)


def describe_event(line: Mapping[str, Any]) -> str:
    """Return an event as a line of text."""
    kind = line["event"]
    if kind == "checkpoint":
        return f"saved in {show_seconds(line['seconds'])}: {line['path']}"
    if kind == "restart":
        after = f"training again after {show_seconds(line['seconds'])}"
        decided = f"; {line['decided']}" if line.get("decided") else ""
        return f"{after}, from step {line['resumed_from']}: {line['why']}{decided}"
    if kind == "input-bound":
        idle = (f"{one['device']} {one['share']:.0%} ({one['limit']})" for one in line["ranks"])
        return f"GPUs wait for data, in parts of each step: {', '.join(idle)}"
    if kind == "plan":
        return "; ".join(filter(None, (line["why"], plan_in_words(line))))
    fields = {k: v for k, v in line.items() if k not in ("event", "step", "time")}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in fields.items())
