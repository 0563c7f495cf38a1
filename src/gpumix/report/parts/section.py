"""Shared elements of the page's parts: headings, labels, tables and remarks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpumix.report.facts import RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.train.run_figures import words
from gpumix.train.run_figures.figures import RunFigures


def render_section(name: str, heading: str, *children: Child, lead: str = "") -> Markup:
    """Return a part with heading."""
    return el(
        "section",
        el("h2", heading, id=f"{name}-heading"),
        el("p", lead, class_="lead") if lead else None,
        children,
        id=name,
        aria_labelledby=f"{name}-heading",
    )


def render_labels(facts: RunFacts) -> list[Markup]:
    """Return labels for numbers not measured on real devices."""
    found = []
    if facts.emulated:
        found.append(el("span", "emulated devices", class_="tag"))
    if facts.estimated:
        found.append(el("span", f"estimated: {words.join_names(facts.estimated, 3)}", class_="tag"))
    return found


def render_table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Child]], *, numbers: int = 0
) -> Markup:
    """Return a table with numeric columns from `numbers` on; 0: none."""

    def cell(name: str, child: Child, place: int) -> Markup:
        number = numbers and place >= numbers
        scope = "col" if name == "th" else None
        return el(name, child, class_="number" if number else None, scope=scope)

    body = [
        el(
            "tr",
            el("th", row[0], scope="row"),
            (cell("td", child, place) for place, child in enumerate(row[1:], 1)),
        )
        for row in rows
    ]
    heads = (cell("th", name, place) for place, name in enumerate(head))
    return el(
        "div",
        el(
            "table",
            el("caption", caption),
            el("thead", el("tr", heads)),
            el("tbody", body),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def render_gap(figures: RunFigures) -> Markup | None:
    """Return in words by how much steps are slower than planned; in red if by much."""
    gap = figures.slower_than_planned
    if gap is None:
        return None
    return el("span", words.describe_gap(gap), class_="off" if words.is_far_off(gap) else None)


def render_row(name: str, picture: Markup, value: Child, class_: str = "row wide") -> Markup:
    """Return a picture with its name and value."""
    named, told = el("span", name, class_="name"), el("span", value, class_="value")
    return el("div", named, picture, told, class_=class_)


def render_remark(words: str) -> Markup:
    """Return a remark below a picture."""
    return el("p", words, class_="aside")
