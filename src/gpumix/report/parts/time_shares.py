"""Time shares of steps by GPU type: computing, and waits for other GPUs, for data, for copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from gpumix.report.draw import draw_bar, draw_legend, draw_picture, get_type_class
from gpumix.report.facts import ClassFacts, RunFacts
from gpumix.report.html import Child, Markup
from gpumix.report.parts.section import render_remark, render_row, render_section
from gpumix.train.run_figures import words

COMPUTING = "compute"
# Shares by cause, with style sheet class and label. Computing has the GPU type's colour.
SHARES = {
    COMPUTING: ("", "computing"),
    "communication": ("wait", "waiting for other GPUs"),
    "input": ("data", "waiting for data"),
    "copies": ("copies", "waiting for copies to and from host memory"),
    "other": ("rest", "between steps"),
}


def render_time_shares(facts: RunFacts) -> Markup:
    known = [one for one in facts.classes if one.shares is not None]
    heading = "Where the time goes"
    if not known:
        return render_section("spent", heading, render_remark(_explain_missing(facts)))
    entries = [
        (class_ or get_type_class(facts.classes.index(known[0])), name)
        for key, (class_, name) in SHARES.items()
        if any(_is_visible(getattr(one.shares, key)) for one in known)
    ]
    return render_section(
        "spent",
        heading,
        draw_legend(entries),
        [_row(one, facts.classes.index(one)) for one in known],
        lead="Measured, as parts of the time of a step; means over the GPUs of each type.",
    )


def _explain_missing(facts: RunFacts) -> str:
    run = facts.run
    if run.history.windows:
        return "Unknown: the run's records do not contain it."
    if run.progress.state == "planned":
        return "Unknown: no step is done yet."
    if run.progress.live:
        return "Unknown: the run has not recorded it yet."
    return "Unknown: the run ended before it was recorded."


def _row(one: ClassFacts, place: int) -> Markup:
    assert one.shares is not None
    shares = asdict(one.shares)
    told = ", ".join(
        f"{words.format_fraction(shares[key])} {name}"
        for key, (_, name) in SHARES.items()
        if _is_visible(shares[key])
    )
    picture = draw_picture(f"{one.device_class}: {told}", 20, _bars(shares, place))
    return render_row(one.device_class, picture, told)


def _bars(shares: dict[str, float], place: int) -> Iterator[Child]:
    at = 0.0
    for key, (class_, name) in SHARES.items():
        title = f"{name}: {words.format_fraction(shares[key])}"
        color = class_ or get_type_class(place)
        yield draw_bar(at, at + shares[key], y=0, height=20, class_=f"{color} part", title=title)
        at += shares[key]


def _is_visible(share: float) -> bool:
    """Return whether a share does not round to 0.0 %."""
    return share >= 5e-4
