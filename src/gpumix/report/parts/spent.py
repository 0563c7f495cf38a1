"""Time shares of steps by class: computing, and waits for data, for other ranks, for copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from gpumix.report import words
from gpumix.report.draw import draw_bar, draw_legend, draw_picture
from gpumix.report.facts import ClassFacts, RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.report.parts.section import render_remark, render_section

SHARES = {
    "compute": ("c0", "computing"),
    "communication": ("c2", "waiting for others"),
    "input": ("c3", "waiting for data"),
    "copies": ("c5", "waiting for copies"),
    "other": ("idle", "other"),
}


def render_time_shares(facts: RunFacts) -> Markup:
    known = [one for one in facts.classes if one.shares is not None]
    if not known:
        return render_section(
            facts, "spent", "What steps were spent on", render_remark(_explain_missing(facts))
        )
    return render_section(
        facts,
        "spent",
        "What steps were spent on",
        draw_legend(SHARES.values()),
        [_row(one) for one in known],
        lead="Measured, as parts of the time of all steps; means over the devices of each class.",
    )


def _explain_missing(facts: RunFacts) -> str:
    run = facts.run
    if run.history.windows:
        return "Not known: what the run told of its devices does not say it."
    if run.progress.state == "planned":
        return "Not known: nothing was trained yet."
    if run.progress.live:
        return "Not known: the run has not told yet how its devices did."
    return "Not known: the run ended before it told how its devices did."


def _row(one: ClassFacts) -> Markup:
    assert one.shares is not None
    shares = asdict(one.shares)
    told = ", ".join(
        f"{words.format_fraction(shares[key])} {name}"
        for key, (_, name) in SHARES.items()
        if _is_visible(shares[key])
    )
    return el(
        "div",
        el("span", one.device_class, class_="name"),
        draw_picture(f"{one.device_class}: {told}", 20, _bars(shares)),
        el("span", told, class_="value"),
        class_="row wide",
    )


def _bars(shares: dict[str, float]) -> Iterator[Child]:
    at = 0.0
    for key, (class_, name) in SHARES.items():
        title = f"{name}: {words.format_fraction(shares[key])}"
        yield draw_bar(at, at + shares[key], y=0, height=20, class_=class_, title=title)
        at += shares[key]


def _is_visible(share: float) -> bool:
    """Return whether a share does not round to 0.0 %."""
    return share >= 5e-4
