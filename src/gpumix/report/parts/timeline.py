"""Timeline of one step, planned and measured, on one time scale: work and waits of each device."""

from __future__ import annotations

from collections.abc import Iterator

from gpumix.report import words
from gpumix.report.draw import (
    choose_ticks,
    draw_bar,
    draw_label,
    draw_legend,
    draw_picture,
    draw_tick,
)
from gpumix.report.facts import RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.report.parts.section import render_remark, render_section
from gpumix.report.step_rows import (
    COPIES,
    WAITING,
    Bar,
    DeviceBars,
    StepRows,
    make_traced_rows,
    simulate_rows,
)
from gpumix.schema.units import format_count

# Kinds of bars, with style sheet class and label.
KINDS = {
    "forward": ("c4", "forward"),
    "head": ("c0", "head and loss"),
    "backward": ("c1", "backward"),
    "weights": ("c6", "gradients of weights"),
    "optimizer": ("c5", "update"),
    WAITING: ("idle", "waiting"),
}
COMMUNICATION_ENTRY = ("c2", "communication")
COPY_ENTRY = ("c3", "copies to and from the host")
LEAST_WIDTH_SHARE = 2e-4  # of the width; shorter bars are not drawn


def render_timeline(facts: RunFacts) -> Markup:
    run = facts.run
    planned = None if run.profile is None else simulate_rows(run.profile, run.plan)
    measured = None if run.trace is None else make_traced_rows(run.trace, run.plan)
    steps = [(n, s) for n, s in (("As planned", planned), ("As measured", measured)) if s]
    if not steps:
        why = (
            "What the devices were measured to do is not in the folder, so a step cannot be "
            "simulated."
        )
        return render_section(facts, "step", "One step", render_remark(why))
    longest = max(step.step_s for _, step in steps)
    return render_section(
        facts,
        "step",
        "One step",
        draw_legend(_list_legend_entries(step for _, step in steps)),
        [_panel(name, step, longest) for name, step in steps],
        None if measured else _render_trace_hint(),
        lead="What each device does over one step: above what it computes or waits for, below what "
        "it sends. Point at a bar to see which unit, or what is waited for.",
    )


def _render_trace_hint() -> Markup:
    command = el("code", "gpumix train JOB.yaml --trace-step STEP")
    return el("p", command, " puts a measured one beside it.", class_="aside")


def _list_legend_entries(steps: Iterator[StepRows]) -> list[tuple[str, str]]:
    """Return the legend entries of the kinds in use."""
    rows = [row for step in steps for row in step.rows]
    kinds = {one.kind for row in rows for one in row.computes}
    entries = [entry for kind, entry in KINDS.items() if kind in kinds]
    sends = {one.kind for row in rows for one in row.sends}
    entries += [COMMUNICATION_ENTRY] if sends - COPIES else []
    entries += [COPY_ENTRY] if sends & COPIES else []
    return entries


def _panel(name: str, step: StepRows, longest: float) -> Markup:
    return el(
        "div",
        el("h3", f"{name}: {words.format_seconds(step.step_s)}"),
        [_row(row, longest, name) for row in step.rows],
        el("div", el("span", class_="name"), _axis(longest), class_="row lane"),
        render_remark(f"{format_count(step.more, 'more group')} of devices not drawn.")
        if step.more
        else None,
        class_="panel",
    )


def _row(row: DeviceBars, longest: float, name: str) -> Markup:
    device, what = row.device, row.device_class
    if row.others:
        device, what = row.device_class, f"{row.others + 1} alike, such as {row.device}"
    busy_s = sum(one.seconds for one in row.computes if one.kind != WAITING)
    title = f"{name}, {row.device}: computes {words.format_seconds(busy_s)} of the step"
    return el(
        "div",
        el(
            "span",
            device,
            el("span", what, class_="small"),
            class_="name",
        ),
        draw_picture(title, 28, _bars(row, longest)),
        class_="row lane",
    )


def _bars(row: DeviceBars, longest: float) -> Iterator[Child]:
    for one in row.computes:
        class_, _ = KINDS.get(one.kind, ("idle", one.kind))
        yield _draw_bar(one, longest, class_, y=0, height=18)
    for one in row.sends:
        class_ = (COPY_ENTRY if one.kind in COPIES else COMMUNICATION_ENTRY)[0]
        yield _draw_bar(one, longest, class_, y=20, height=6)


def _draw_bar(one: Bar, longest: float, class_: str, *, y: float, height: float) -> Markup | None:
    if one.seconds < LEAST_WIDTH_SHARE * longest:
        return None
    told = f"waits for {one.name}" if one.kind == WAITING else one.name
    title = f"{told}: {words.format_seconds(one.seconds)}"
    begin, end = one.start_s / longest, one.end_s / longest
    return draw_bar(begin, end, y=y, height=height, class_=class_, title=title)


def _axis(longest: float) -> Markup:
    marks = [at for at in choose_ticks(0.0, longest, 4) if at <= longest]
    drawn = (
        (draw_tick(at / longest, 0, 4), draw_label(at / longest, 16, _time(at))) for at in marks
    )
    return el("svg", drawn, width="100%", height=20, class_="axis", aria_hidden="true")


def _time(at: float) -> str:
    return "0" if at == 0 else f"{at:g} s" if at >= 1 else f"{at * 1e3:g} ms"
