"""What to do next, the first box of the page."""

from __future__ import annotations

from gpumix.report.facts import RunFacts
from gpumix.report.html import Markup, el
from gpumix.report.parts.section import render_section
from gpumix.train.run_figures.advice import Advice


def render_advice(facts: RunFacts) -> Markup:
    advice = facts.run.advice
    items = [_item(one) for one in advice]
    shown = el("ol", [el("li", one) for one in items], class_="next") if items[1:] else items[0]
    return render_section("next", "What to do next", shown)


def _item(one: Advice) -> list[Markup]:
    parts = [el("strong", one.what, class_="off" if one.urgent else None)]
    if one.why:
        parts.append(el("span", f": {one.why}."))
    if one.command:
        parts.append(el("code", one.command, class_="command"))
    return parts
