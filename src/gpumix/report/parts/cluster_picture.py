"""Picture of the cluster: hosts as boxes, links, and each device's part in computing and
storing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gpumix.report.cluster import Box, BoxMember, PlanPart, Rate
from gpumix.report.draw import (
    Entry,
    draw_bar,
    draw_legend,
    draw_picture,
    draw_tick,
    get_type_class,
)
from gpumix.report.facts import RunFacts
from gpumix.report.html import Markup, el
from gpumix.report.parts.plan_picture import STORED_TONE, class_names
from gpumix.report.parts.section import render_remark, render_section
from gpumix.report.ranges import Range
from gpumix.schema.units import format_count
from gpumix.train.run_figures import words

MOST_BOXES = 24  # drawn per box; the rest is counted
BAR_PIXELS = 9  # pixels
THINNEST, THICKEST = 1.0, 7.0  # pixels, for links of 10 MB/s and of 1 TB/s


def render_cluster(facts: RunFacts) -> Markup:
    whole = facts.cluster
    many = whole.devices > len(whole.all_members)
    return render_section(
        "cluster",
        "The cluster",
        draw_legend(_legend(facts)),
        _draw_outermost(whole, _Scale(facts)),
        render_remark(_note(facts, many=many)),
        lead="Hosts, links, and the share of the samples and of the training state of each GPU.",
    )


def _legend(facts: RunFacts) -> Iterator[Entry]:
    for name in class_names(facts):
        yield _colour(facts, name), name
    parts = [m.part for m in facts.cluster.all_members if m.part is not None]
    if parts:
        even = Range.of(part.even_computed for part in parts).format_with(words.format_fraction)
        yield "even", f"an even split: {even} of the samples each", "mark"


def _colour(facts: RunFacts, name: str) -> str:
    return get_type_class(class_names(facts).index(name))


def _note(facts: RunFacts, *, many: bool) -> str:
    parts = ["All bars have one scale."]
    if many:
        parts.append("GPUs of one type in one box are drawn once, with their mean.")
    if len(facts.run.plan.stages) > 1:
        parts.append("Shares are of the samples and the training state of a GPU's pipeline stage.")
    if _has_link(facts.cluster):
        parts.append("Link rates are of one large message between two GPUs, or two hosts.")
    elif facts.cluster.devices > 1:
        parts.append("The speed of its links is unknown.")
    return " ".join(parts)


def _has_link(box: Box) -> bool:
    return box.link is not None or any(map(_has_link, box.boxes))


class _Scale:
    """Scale of bars: the longest bar fills its track."""

    def __init__(self, facts: RunFacts) -> None:
        parts = [m.part for m in facts.cluster.all_members if m.part is not None]
        self.facts = facts
        self.longest = max((x for part in parts for x in _lengths(part)), default=1.0) or 1.0

    def at(self, part: float) -> float:
        return part / self.longest


def _lengths(part: PlanPart) -> Iterator[float]:
    yield from (part.computed, part.even_computed)
    if part.stored is not None and part.even_stored is not None:
        yield from (part.stored, part.even_stored)


def _draw_outermost(box: Box, scale: _Scale) -> Markup:
    """Draw the outermost box, omitted for a single host."""
    alone = len(box.boxes) == 1 and not box.boxes[0].alike
    return el("div", _box(box.boxes[0] if alone else box, scale), class_="cluster")


def _box(box: Box, scale: _Scale) -> Markup:
    inner = [_box(one, scale) for one in box.boxes[:MOST_BOXES]]
    more = len(box.boxes) - len(inner)
    return el(
        "div",
        el("div", _draw_box_name(box), _link(box), class_="box-head"),
        el("div", inner, class_="boxes") if inner else None,
        render_remark(f"{more:,} more are not shown.") if more else None,
        el("div", [_member(one, scale) for one in box.members], class_="members")
        if box.members
        else None,
        class_=f"box {box.level}",
    )


def _draw_box_name(box: Box) -> Markup:
    names = {
        "cluster": format_count(box.hosts, "host"),
        "rack": f"rack {box.name}",
        "host": box.name,
        "island": f"island {box.name}",
    }
    told = format_count(box.devices, "GPU")
    alike = f"and {format_count(len(box.alike), 'equal host')}, {told} in total"
    return el(
        "p",
        el("strong", names[box.level]),
        " ",
        el("span", alike if box.alike else told, title=", ".join(box.alike[:40]) or None),
        class_="box-name",
    )


def _link(box: Box) -> Markup | None:
    """Draw the link of a box: a line with thickness by rate, and the rate."""
    link = box.link
    if link is None:
        return None
    between = _describe_link_ends(box)
    told = link.bytes_per_s.format_with(words.format_link_rate)
    name = f" {link.name}" if link.name not in ("", told) else ""
    return el(
        "p",
        _line(link),
        el("span", told, class_="rate"),
        el("span", f" {between}, {link.source}{name}"),
        class_="link",
    )


def _describe_link_ends(box: Box) -> str:
    inner = {one.level for one in box.boxes}
    if "island" in inner:
        return "between islands"
    if "rack" in inner:
        return "between racks"
    return "between hosts" if inner else "inside"


def _line(link: Rate) -> Markup:
    decades = math.log10(max(link.bytes_per_s.least, 1.0)) - 7
    width = min(THICKEST, max(THINNEST, THINNEST + decades * (THICKEST - THINNEST) / 5))
    ends = (el("circle", cx=x, cy=6, r=4) for x in (4, 40))
    line = el("line", x1=4, x2=40, y1=6, y2=6, stroke_width=width)
    return el("svg", line, ends, width=44, height=12, aria_hidden="true", class_="wire")


def _member(one: BoxMember, scale: _Scale) -> Markup:
    name = f"{one.count:,} × {one.device_class}" if one.count > 1 else one.device
    what = "" if one.count > 1 else one.device_class
    class_ = _colour(scale.facts, one.device_class) if one.part is not None else "unused"
    square = el("rect", width=11, height=11, rx=2, class_=class_)
    head = [
        el("svg", square, width=11, height=11, aria_hidden="true", class_="swatch"),
        el("strong", name, title=name, class_="device"),
    ]
    if one.part is None:
        return el(
            "div",
            el("div", head, class_="member-head"),
            el("p", ", ".join(filter(None, (what, "not used"))), class_="small"),
            class_="member out",
        )
    return el(
        "div",
        el("div", head, class_="member-head"),
        el("p", ", ".join(filter(None, (what, *_describe_stages(one.part)))), class_="small"),
        *_bars(one, one.part, scale, class_),
        class_="member",
    )


def _describe_stages(part: PlanPart) -> Iterator[str]:
    if part.stages:
        numbers = ", ".join(map(str, part.stages))
        yield f"stage {numbers}" if len(part.stages) == 1 else f"stages {numbers}"
    if part.tensor_parallel > 1:
        yield f"tensor-parallel group of {part.tensor_parallel}"


def _bars(one: BoxMember, part: PlanPart, scale: _Scale, class_: str) -> Iterator[Markup]:
    of_group = " a group" if part.tensor_parallel > 1 else ""
    samples = f"{one.samples.format_with(words.format_number)} samples{of_group}"
    yield from _row("computes", part.computed, part.even_computed, scale, class_, samples)
    if part.stored is None or part.even_stored is None:
        yield el("p", el("span", "stores"), el("span", "all", class_="rate"), class_="told")
        return
    of_state, stored_class = "of the training state", f"{class_} tone{STORED_TONE}"
    yield from _row("stores", part.stored, part.even_stored, scale, stored_class, of_state)


def _row(
    what: str, part: float, even: float, scale: _Scale, class_: str, unit: str
) -> Iterator[Markup]:
    told = words.format_fraction(part)
    title = f"{what} {told}, {unit}; an even split has {words.format_fraction(even)}"
    yield el("p", el("span", what), el("span", told, class_="rate"), class_="told")
    yield draw_picture(
        title,
        BAR_PIXELS + 4,
        draw_bar(0, 1, y=2, height=BAR_PIXELS, class_="track"),
        draw_bar(0, scale.at(part), y=2, height=BAR_PIXELS, class_=class_),
        draw_tick(scale.at(even), 0, BAR_PIXELS + 4, "halo thin"),
        draw_tick(scale.at(even), 0, BAR_PIXELS + 4, "even"),
    )
