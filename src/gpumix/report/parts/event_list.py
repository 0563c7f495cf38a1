"""Events by step: rebalancing, restarts, failures, waits for data, checkpoints, the end."""

from __future__ import annotations

from gpumix.report.events import ShownEvent
from gpumix.report.facts import RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.report.parts.section import render_remark, render_section, render_table
from gpumix.schema.units import format_count
from gpumix.train.run_figures import words

CHECKPOINTS = 6  # listed among all events; more are folded into a list of checkpoints
MOST = 500


def render_events(facts: RunFacts) -> Markup:
    told = list(facts.events)
    saves = [one for one in told if one.event == "checkpoint"]
    folded: list[ShownEvent] = []
    if len(saves) > CHECKPOINTS:
        folded = saves
        told = [one for one in told if one.event != "checkpoint"]
    return render_section(
        "events",
        "What happened",
        _table("Events, in order of time", told) if told else render_remark("Only steps so far."),
        el(
            "details",
            el("summary", format_count(len(folded), "checkpoint")),
            _table("Checkpoints", folded),
        )
        if folded
        else None,
    )


def _table(caption: str, told: list[ShownEvent]) -> Markup:
    rows: list[list[Child]] = [
        [f"{one.step:,}", words.format_time(one.time), _what(one), one.why] for one in told[-MOST:]
    ]
    left = len(told) - len(rows)
    caption += f"; the first {left:,} are not shown" if left else ""
    return render_table(caption, ["step", "time", "what", "why"], rows)


def _what(one: ShownEvent) -> Markup:
    return el("span", one.what, class_=f"weight {one.weight}")
