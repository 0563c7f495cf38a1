"""Predicted memory of each class by cause, against its limit, with the measured peak as a mark."""

from __future__ import annotations

from collections.abc import Iterator

from gpumix.cost.layout.causes import MEMORY_PARTS, group_by_part
from gpumix.report import words
from gpumix.report.draw import (
    Entry,
    draw_bar,
    draw_legend,
    draw_picture,
    draw_tick,
    get_color_class,
)
from gpumix.report.facts import ClassFacts, RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.report.parts.section import render_remark, render_section, render_table

LIMIT_AT = 0.94  # fraction of the width, leaving room to show memory beyond the limit


def render_memory(facts: RunFacts) -> Markup:
    known = [one for one in facts.classes if one.memory_limit_bytes]
    if not known:
        why = "The plan holds no prediction, so its memory is not known."
        return render_section(facts, "memory", "Memory against limits", render_remark(why))
    causes = _list_causes(known)
    colours = {cause: get_color_class(place) for place, cause in enumerate(causes)}
    entries: list[Entry] = [(colours[cause], cause) for cause in causes]
    measured = any(one.peak_bytes for one in known)
    entries += [("limit", "limit", "mark")]
    entries += [("mark", "measured peak", "mark")] if measured else []
    return render_section(
        facts,
        "memory",
        "Memory against limits",
        draw_legend(entries),
        [_row(one, colours) for one in known],
        el("details", el("summary", "As numbers"), _table(known, causes)),
        lead="Predicted peak of the fullest device of each class, by cause"
        + ("; a mark where the measured peak was." if measured else "."),
    )


def _list_causes(known: list[ClassFacts]) -> list[str]:
    """Return all causes in use, largest first."""
    most: dict[str, int] = {}
    for one in known:
        for cause, taken in one.planned_memory.items():
            most[cause] = max(most.get(cause, 0), taken)
    return sorted((cause for cause, taken in most.items() if taken), key=lambda c: -most[c])


def _row(one: ClassFacts, colours: dict[str, str]) -> Markup:
    assert one.memory_limit_bytes
    scale = LIMIT_AT / one.memory_limit_bytes
    planned = words.format_bytes(one.planned_peak_bytes)
    told = f"{planned} of {words.format_bytes(one.memory_limit_bytes)}"
    if one.peak_bytes is not None:
        told += f"; measured {words.format_bytes(one.peak_bytes)}"
    if one.host_bytes:
        told += f"; {words.format_bytes(one.host_bytes)} more on the host"
    return el(
        "div",
        el("span", one.device_class, class_="name"),
        draw_picture(f"{one.device_class}: {told}", 30, _draw_bars(one, colours, scale)),
        el("span", told, class_="value"),
        class_="row wide",
    )


def _draw_bars(one: ClassFacts, colours: dict[str, str], scale: float) -> Iterator[Child]:
    yield draw_bar(0, LIMIT_AT, y=4, height=20, class_="track")
    at = 0
    for cause, class_ in colours.items():
        taken = one.planned_memory.get(cause, 0)
        if taken:
            title = f"{cause}: {words.format_bytes(taken)}"
            yield draw_bar(
                at * scale, (at + taken) * scale, y=4, height=20, class_=class_, title=title
            )
            at += taken
    yield draw_tick(LIMIT_AT, 0, 28, "limit")
    if one.peak_bytes is not None:
        yield draw_tick(one.peak_bytes * scale, 0, 28, "mark")


def _table(known: list[ClassFacts], causes: list[str]) -> Markup:
    rows = [
        [cause, *(words.format_bytes(one.planned_memory.get(cause, 0)) for one in known)]
        for cause in causes
    ]
    rows.append(["predicted peak", *(words.format_bytes(one.planned_peak_bytes) for one in known)])
    for part in MEMORY_PARTS if any(one.measured_memory for one in known) else ():
        planned = [group_by_part(one.planned_memory)[part] for one in known]
        measured = [one.measured_memory.get(part) for one in known]
        rows.append([f"{part}, predicted", *map(words.format_bytes, planned)])
        rows.append([f"{part}, measured", *map(words.format_bytes, measured)])
    rows.append(["measured peak", *(words.format_bytes(one.peak_bytes) for one in known)])
    if any(one.reserved_bytes is not None for one in known):
        held = [words.format_bytes(one.reserved_bytes) for one in known]
        rows.append(["measured peak of the allocator", *held])
        retries = [words.format_number(one.retries) for one in known]
        rows.append(["times that it gave memory back to get some", *retries])
    rows.append(["limit", *(words.format_bytes(one.memory_limit_bytes) for one in known)])
    rows.append(["on the host", *(words.format_bytes(one.host_bytes) for one in known)])
    head = ["cause", *(one.device_class for one in known)]
    return render_table("Memory of the fullest device of each class", head, rows, numbers=1)
