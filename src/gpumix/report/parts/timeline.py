"""Timeline of one step, measured and planned, on one time scale: work and waits of each device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpumix.report.draw import (
    choose_ticks,
    draw_bar,
    draw_label,
    draw_legend,
    draw_picture,
    draw_tick,
    get_type_class,
)
from gpumix.report.facts import RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.report.parts.plan_picture import class_names
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
from gpumix.train.run_figures import words

# Kinds of bars, with style sheet class and label. Work has tones of the GPU type's colour.
KINDS = {
    "forward": ("tone0", "forward"),
    "head": ("tone1", "head and loss"),
    "backward": ("tone2", "backward"),
    "weights": ("tone3", "gradients of weights"),
    "optimizer": ("tone4", "optimizer step"),
    WAITING: ("wait", "waiting for other GPUs or data"),
}
COMMUNICATION_ENTRY = ("communication", "communication")
COPY_ENTRY = ("copies", "copies to and from host memory")
LEAST_WIDTH_SHARE = 2e-4  # of the width; shorter bars are not drawn


def render_timeline(facts: RunFacts) -> Markup:
    run = facts.run
    planned = None if run.profile is None else simulate_rows(run.profile, run.plan)
    measured = None if run.trace is None else make_traced_rows(run.trace, run.plan)
    steps = [
        (n, s) for n, s in (("Measured, one step", measured), ("Planned, simulated", planned)) if s
    ]
    if not steps:
        why = "The folder has no profile of the devices, so a step cannot be simulated."
        return render_section("step", "One step", render_remark(why))
    longest = max(step.step_s for _, step in steps)
    places = {name: place for place, name in enumerate(class_names(facts))}
    return render_section(
        "step",
        "One step",
        draw_legend(_list_legend_entries(step for _, step in steps)),
        [_panel(name, step, longest, places) for name, step in steps],
        None if measured else _render_trace_hint(),
        lead="Each GPU over one step: above, what it computes or waits for; below, what it sends.",
    )


def _render_trace_hint() -> Markup:
    command = el("code", "gpumix train JOB.yaml --trace-step STEP")
    return el("p", command, " adds a measured step.", class_="aside")


def _list_legend_entries(steps: Iterator[StepRows]) -> list[tuple[str, str]]:
    """Return the legend entries of the kinds in use."""
    rows = [row for step in steps for row in step.rows]
    kinds = {one.kind for row in rows for one in row.computes}
    first = get_type_class(0)
    entries = [
        (class_ if kind == WAITING else f"{first} {class_}", name)
        for kind, (class_, name) in KINDS.items()
        if kind in kinds
    ]
    sends = {one.kind for row in rows for one in row.sends}
    entries += [COMMUNICATION_ENTRY] if sends - COPIES else []
    entries += [COPY_ENTRY] if sends & COPIES else []
    return entries


def _panel(name: str, step: StepRows, longest: float, places: Mapping[str, int]) -> Markup:
    return el(
        "div",
        el("h3", f"{name}: {words.format_seconds(step.step_s)}"),
        [_row(row, longest, name, places) for row in step.rows],
        el("div", el("span", class_="name"), _axis(longest), class_="row lane"),
        render_remark(f"{format_count(step.more, 'more group')} of GPUs not shown.")
        if step.more
        else None,
        class_="panel",
    )


def _row(row: DeviceBars, longest: float, name: str, places: Mapping[str, int]) -> Markup:
    device, what = row.device, row.device_class
    if row.others:
        device, what = row.device_class, f"{row.others + 1} equal GPUs, such as {row.device}"
    busy_s = sum(one.seconds for one in row.computes if one.kind != WAITING)
    told = f"computes {words.format_seconds(busy_s)}"
    waits_s = sum(one.seconds for one in row.computes if one.kind == WAITING)
    told += f", waits {words.format_seconds(waits_s)}" if waits_s else ""
    color = get_type_class(places.get(row.device_class, 0))
    return el(
        "div",
        el(
            "span",
            device,
            el("span", what if what != device else "", class_="small"),
            el("span", told, class_="small"),
            class_="name",
        ),
        draw_picture(f"{name}, {row.device}: {told}", 28, _bars(row, longest, color)),
        class_="row lane",
    )


def _bars(row: DeviceBars, longest: float, color: str) -> Iterator[Child]:
    for one in row.computes:
        class_, _ = KINDS.get(one.kind, ("tone0", one.kind))
        class_ = class_ if one.kind == WAITING else f"{color} {class_}"
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
