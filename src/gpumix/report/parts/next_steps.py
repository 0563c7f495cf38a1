"""What to do next, the first box of the page."""

from __future__ import annotations

from gpumix.report.facts import RunFacts
from gpumix.report.html import Markup, el
from gpumix.report.parts.section import render_section
from gpumix.train.run_figures.advice import Advice


def render_advice(facts: RunFacts) -> Markup:
    items = (el("li", _item(one)) for one in facts.run.advice)
    return render_section("next", "What to do next", el("ol", items, class_="next"))


def _item(one: Advice) -> list[Markup]:
    parts = [el("strong", one.what, class_="off" if one.urgent else None)]
    if one.why:
        parts.append(el("span", f": {one.why}."))
    if one.command:
        parts.append(el("code", one.command, class_="command"))
    return parts
