"""Memory of each GPU type: the measured peak as a mark over the predicted causes, and the limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpumix.cost.memory_layout.memory_parts import MEMORY_PARTS, group_by_part
from gpumix.report.draw import (
    TONES,
    Entry,
    draw_bar,
    draw_legend,
    draw_picture,
    draw_tick,
    get_type_class,
)
from gpumix.report.facts import ClassFacts, RunFacts
from gpumix.report.html import Child, Markup
from gpumix.report.parts.section import render_remark, render_row, render_section, render_table
from gpumix.train.run_figures import words

LIMIT_AT = 0.94  # fraction of the width, leaving room to show memory beyond the limit
LEAST_SHARE = 0.01  # of a peak; causes below that in each GPU type are drawn as one
REST = "other"


def render_memory(facts: RunFacts) -> Markup:
    known = [one for one in facts.classes if one.memory_limit_bytes]
    if not known:
        why = "The plan has no prediction, so its memory is unknown."
        return render_section("memory", "Memory", render_remark(why))
    causes = _list_causes(known)
    drawn = _choose_drawn(known, causes)
    tones = {cause: tone for tone, cause in enumerate(drawn)}
    first = facts.classes.index(known[0])
    entries: list[Entry] = [
        (get_type_class(first, tone), words.name_memory(cause)) for cause, tone in tones.items()
    ]
    entries += [("limit", "limit", "mark")]
    if any(one.peak_bytes for one in known):
        entries += [("mark", "measured peak", "mark")]
    return render_section(
        "memory",
        "Memory",
        draw_legend(entries),
        [_row(one, facts.classes.index(one), tones) for one in known],
        _table(known, causes),
        lead="Measured peak of the fullest GPU of each type, over the predicted one by cause.",
    )


def _list_causes(known: list[ClassFacts]) -> list[str]:
    """Return all causes in use, largest first."""
    most: dict[str, int] = {}
    for one in known:
        for cause, taken in one.planned_memory.items():
            most[cause] = max(most.get(cause, 0), taken)
    return sorted((cause for cause, taken in most.items() if taken), key=lambda c: -most[c])


def _choose_drawn(known: list[ClassFacts], causes: Sequence[str]) -> list[str]:
    """Return the causes drawn one by one, and `REST` for the others if there are any."""
    large = [
        cause
        for cause in causes
        if any(
            one.planned_memory.get(cause, 0) >= LEAST_SHARE * sum(one.planned_memory.values())
            for one in known
        )
    ]
    if len(large) == len(causes) <= TONES:
        return list(causes)
    return [*large[: TONES - 1], REST]


def _row(one: ClassFacts, place: int, tones: dict[str, int]) -> Markup:
    assert one.memory_limit_bytes
    scale = LIMIT_AT / one.memory_limit_bytes
    planned, limit = (
        words.format_bytes(n) for n in (one.planned_peak_bytes, one.memory_limit_bytes)
    )
    told = f"predicted {planned} of {limit}"
    if one.peak_bytes is not None:
        told = f"measured {words.format_bytes(one.peak_bytes)}, {told}"
    if one.host_bytes:
        told += f", and {words.format_bytes(one.host_bytes)} of host memory"
    bars = _draw_bars(one, place, tones, scale)
    return render_row(one.device_class, draw_picture(f"{one.device_class}: {told}", 30, bars), told)


def _draw_bars(one: ClassFacts, place: int, tones: dict[str, int], scale: float) -> Iterator[Child]:
    yield draw_bar(0, LIMIT_AT, y=4, height=20, class_="track")
    at, rest = 0, sum(n for cause, n in one.planned_memory.items() if cause not in tones)
    for cause, tone in tones.items():
        taken = rest if cause == REST else one.planned_memory.get(cause, 0)
        if taken:
            title = f"{words.name_memory(cause)}: {words.format_bytes(taken)}"
            begin, end = at * scale, (at + taken) * scale
            class_ = f"{get_type_class(place, tone)} part"
            yield draw_bar(begin, end, y=4, height=20, class_=class_, title=title)
            at += taken
    yield draw_tick(LIMIT_AT, 0, 28, "limit")
    if one.peak_bytes is not None:
        yield draw_tick(one.peak_bytes * scale, 0, 28, "halo")
        yield draw_tick(one.peak_bytes * scale, 0, 28, "mark")


def _table(known: list[ClassFacts], causes: list[str]) -> Markup:
    rows = [["measured peak", *(words.format_bytes(one.peak_bytes) for one in known)]]
    rows.append(["predicted peak", *(words.format_bytes(one.planned_peak_bytes) for one in known)])
    rows += [
        [
            f"predicted: {words.name_memory(cause)}",
            *(words.format_bytes(one.planned_memory.get(cause, 0)) for one in known),
        ]
        for cause in causes
    ]
    for part in MEMORY_PARTS if any(one.measured_memory for one in known) else ():
        planned = [group_by_part(one.planned_memory)[part] for one in known]
        measured = [one.measured_memory.get(part) for one in known]
        name = words.name_memory(part)
        rows.append([f"{name}, measured", *map(words.format_bytes, measured)])
        rows.append([f"{name}, predicted", *map(words.format_bytes, planned)])
    if any(one.reserved_bytes is not None for one in known):
        held = [words.format_bytes(one.reserved_bytes) for one in known]
        rows.append(["reserved by the allocator", *held])
        retries = [words.format_number(one.retries) for one in known]
        rows.append(["times that the allocator had to free memory", *retries])
    rows.append(["limit", *(words.format_bytes(one.memory_limit_bytes) for one in known)])
    if any(one.host_bytes for one in known):
        rows.append(["host memory", *(words.format_bytes(one.host_bytes) for one in known)])
    head = ["", *(one.device_class for one in known)]
    return render_table("Fullest GPU of each type", head, rows, numbers=1)
