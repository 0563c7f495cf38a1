"""Predicted memory of each class by cause, against its limit, with the measured peak as a mark."""

from __future__ import annotations

from collections.abc import Iterator

from gpumix.cost.layout.causes import PARTS, in_parts
from gpumix.report import words
from gpumix.report.draw import Entry, bar, colour, legend, picture, tick
from gpumix.report.facts import ClassFacts, RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.report.parts.section import aside, section, table

LIMIT_AT = 0.94  # fraction of the width, leaving room to show memory beyond the limit


def memory_bars(facts: RunFacts) -> Markup:
    known = [one for one in facts.classes if one.memory_limit_bytes]
    if not known:
        why = "The plan holds no prediction, so its memory is not known."
        return section(facts, "memory", "Memory against limits", aside(why))
    causes = _causes(known)
    colours = {cause: colour(place) for place, cause in enumerate(causes)}
    entries: list[Entry] = [(colours[cause], cause) for cause in causes]
    measured = any(one.peak_bytes for one in known)
    entries += [("limit", "limit", "mark")]
    entries += [("mark", "measured peak", "mark")] if measured else []
    return section(
        facts,
        "memory",
        "Memory against limits",
        legend(entries),
        [_row(one, colours) for one in known],
        el("details", el("summary", "As numbers"), _table(known, causes)),
        lead="Predicted peak of the fullest device of each class, by cause"
        + ("; a mark where the measured peak was." if measured else "."),
    )


def _causes(known: list[ClassFacts]) -> list[str]:
    """Return all causes in use, largest first."""
    most: dict[str, int] = {}
    for one in known:
        for cause, taken in one.planned_memory.items():
            most[cause] = max(most.get(cause, 0), taken)
    return sorted((cause for cause, taken in most.items() if taken), key=lambda c: -most[c])


def _row(one: ClassFacts, colours: dict[str, str]) -> Markup:
    assert one.memory_limit_bytes
    scale = LIMIT_AT / one.memory_limit_bytes
    planned = words.size(one.planned_peak_bytes)
    told = f"{planned} of {words.size(one.memory_limit_bytes)}"
    if one.peak_bytes is not None:
        told += f"; measured {words.size(one.peak_bytes)}"
    if one.host_bytes:
        told += f"; {words.size(one.host_bytes)} more on the host"
    return el(
        "div",
        el("span", one.device_class, class_="name"),
        picture(f"{one.device_class}: {told}", 30, _drawn(one, colours, scale)),
        el("span", told, class_="value"),
        class_="row wide",
    )


def _drawn(one: ClassFacts, colours: dict[str, str], scale: float) -> Iterator[Child]:
    yield bar(0, LIMIT_AT, y=4, height=20, class_="track")
    at = 0
    for cause, class_ in colours.items():
        taken = one.planned_memory.get(cause, 0)
        if taken:
            title = f"{cause}: {words.size(taken)}"
            yield bar(at * scale, (at + taken) * scale, y=4, height=20, class_=class_, title=title)
            at += taken
    yield tick(LIMIT_AT, 0, 28, "limit")
    if one.peak_bytes is not None:
        yield tick(one.peak_bytes * scale, 0, 28, "mark")


def _table(known: list[ClassFacts], causes: list[str]) -> Markup:
    rows = [
        [cause, *(words.size(one.planned_memory.get(cause, 0)) for one in known)]
        for cause in causes
    ]
    rows.append(["predicted peak", *(words.size(one.planned_peak_bytes) for one in known)])
    for part in PARTS if any(one.measured_memory for one in known) else ():
        planned = [in_parts(one.planned_memory)[part] for one in known]
        measured = [one.measured_memory.get(part) for one in known]
        rows.append([f"{part}, predicted", *map(words.size, planned)])
        rows.append([f"{part}, measured", *map(words.size, measured)])
    rows.append(["measured peak", *(words.size(one.peak_bytes) for one in known)])
    if any(one.reserved_bytes is not None for one in known):
        held = [words.size(one.reserved_bytes) for one in known]
        rows.append(["measured peak of the allocator", *held])
        retries = [words.count(one.retries) for one in known]
        rows.append(["times that it gave memory back to get some", *retries])
    rows.append(["limit", *(words.size(one.memory_limit_bytes) for one in known)])
    rows.append(["on the host", *(words.size(one.host_bytes) for one in known)])
    head = ["cause", *(one.device_class for one in known)]
    return table("Memory of the fullest device of each class", head, rows, numbers=1)
