"""Speed of the run, against an even split and against the sum of its devices' individual speeds."""

from __future__ import annotations

from gpumix.report import words
from gpumix.report.draw import draw_bar, draw_picture
from gpumix.report.facts import RunFacts
from gpumix.report.html import Markup, el
from gpumix.report.parts.section import render_busy_warning, render_labels, render_remark
from gpumix.report.speed import RunSpeeds, StepSpeed
from gpumix.schema.units import format_count

MOST = 0.985  # fraction of the width taken by the longest bar


def render_speeds(facts: RunFacts) -> Markup:
    found = facts.answer
    return el(
        "section",
        el("h2", "How fast", " ", render_labels(facts), id="answer-heading"),
        el(
            "div",
            _render_speed_figure(found),
            _render_even_figure(found),
            _render_ideal_figure(found),
            class_="figures",
        ),
        _bars(found),
        render_busy_warning(facts),
        render_remark(_note(facts)),
        id="answer",
        aria_labelledby="answer-heading",
    )


def _figure(number: str, what: str, how: str, class_: str = "figure") -> Markup:
    return el(
        "div",
        el("p", number, class_="big"),
        el("p", what, class_="what"),
        el("p", how, class_="how"),
        class_=class_,
    )


def _render_speed_figure(found: RunSpeeds) -> Markup:
    best = found.best
    if not best:
        return _figure(words.UNKNOWN, "tokens/s", best.why)
    how = f"{best.source}, {words.format_seconds(best.step_s)} a step"
    if found.prediction_error is not None:
        how += f"; predicted step time off by {found.prediction_error:+.1%}"
    return _figure(words.format_number(best.tokens_per_s), "tokens/s", how, "figure first")


def _render_even_figure(found: RunSpeeds) -> Markup:
    if found.speedup_over_even is None:
        why = found.even.why or found.comparable_to_even.why
        return _figure(words.UNKNOWN, "against an even split", why)
    what = "the speed of an even split"
    return _figure(
        words.format_factor(found.speedup_over_even),
        what,
        _describe_sources(found.comparable_to_even, found.even),
    )


def _render_ideal_figure(found: RunSpeeds) -> Markup:
    what = "of what all devices reach alone, added up"
    if found.fraction_of_ideal is None:
        return _figure(words.UNKNOWN, what, found.ideal.why or found.best.why)
    return _figure(
        f"{found.fraction_of_ideal:.0%}", what, _describe_sources(found.best, found.ideal)
    )


def _describe_sources(here: StepSpeed, other: StepSpeed) -> str:
    """Describe both sides of a comparison."""
    return (
        f"{here.source} here; {words.format_token_rate(other.tokens_per_s)} there, {other.source}"
    )


def _bars(found: RunSpeeds) -> Markup | None:
    rows = [
        ("even split", found.even, "bar-other"),
        ("this plan", found.predicted, "bar-predicted"),
        ("this run", found.measured, "bar-measured"),
        ("ideal", found.ideal, "bar-other"),
    ]
    known = [(name, speed, class_) for name, speed, class_ in rows if speed.tokens_per_s]
    if len(known) < 2:
        return None
    longest = max(speed.tokens_per_s or 0.0 for _, speed, _ in known)
    return el("div", (_bar(*row, longest) for row in known), class_="bars")


def _bar(name: str, speed: StepSpeed, class_: str, longest: float) -> Markup:
    told = words.format_token_rate(speed.tokens_per_s)
    part = MOST * (speed.tokens_per_s or 0.0) / longest
    title = f"{name}: {told}, {speed.source}"
    return el(
        "div",
        el("span", name, class_="name"),
        draw_picture(title, 16, draw_bar(0, part, y=0, height=16, class_=class_, title=title)),
        el("span", told, " ", el("em", speed.source), class_="value"),
        class_="row",
    )


def _note(facts: RunFacts) -> str:
    steps = len(facts.run.history.counted())
    every = facts.run.history.every
    one_in = f", one in {every}" if every > 1 else ""
    parts = []
    if steps:
        earlier = " and those by an earlier plan" if facts.run.history.last_other_plan_step else ""
        parts.append(
            f"Measured: the median of {format_count(steps, 'step')}{one_in}, those after each start"
            f"{earlier} left out."
        )
    known = "datasheets of the cards" if facts.estimated else "what was measured of each class"
    parts.append(f"Predicted: what the cost model expects from {known}.")
    parts.append(
        "Ideal: each device of the cluster computing without a pause in its fastest way, "
        "sending nothing and lacking no memory."
    )
    if facts.emulated:
        parts.append("Times are of the emulation, not of any real card.")
    return " ".join(parts)
