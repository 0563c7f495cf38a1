"""Speed of the run, against an even split and against the sum of its devices' individual speeds."""

from __future__ import annotations

from gpumix.report.draw import draw_bar, draw_picture
from gpumix.report.facts import RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.report.parts.section import render_gap, render_remark, render_row, render_section
from gpumix.report.speed import RunSpeeds, StepSpeed
from gpumix.schema.units import format_count
from gpumix.train.run_figures import words
from gpumix.train.run_figures.figures import find_last_other_plan_step

MOST = 0.985  # fraction of the width taken by the longest bar


def render_speeds(facts: RunFacts) -> Markup:
    found = facts.answer
    return render_section(
        "answer",
        "How fast",
        el(
            "div",
            _render_speed_figure(facts),
            _render_even_figure(found),
            _render_ideal_figure(found),
            class_="figures",
        ),
        _bars(found),
        render_remark(_note(facts)),
    )


def _figure(number: str, what: str, how: Child, class_: str = "figure") -> Markup:
    return el(
        "div",
        el("p", number, class_="big"),
        el("p", what, class_="what"),
        el("p", how, class_="how"),
        class_=class_,
    )


def _render_speed_figure(facts: RunFacts) -> Markup:
    best = facts.answer.best
    if not best:
        return _figure(words.UNKNOWN, "tokens/s", best.why, "figure first")
    how: list[Child] = [f"{best.source}, {words.format_seconds(best.step_s)} a step"]
    if gap := render_gap(facts.figures):
        how += [", ", gap]
    return _figure(words.format_number(best.tokens_per_s), "tokens/s", how, "figure first")


def _render_even_figure(found: RunSpeeds) -> Markup:
    if found.speedup_over_even is None:
        why = found.even.why or found.comparable_to_even.why
        return _figure(words.UNKNOWN, "compared with an even split", why)
    what = "the speed of an even split"
    return _figure(
        words.format_factor(found.speedup_over_even),
        what,
        _describe_sources(found.comparable_to_even, "even split", found.even),
    )


def _render_ideal_figure(found: RunSpeeds) -> Markup:
    what = "of the speed of all GPUs, each alone, added up"
    if found.fraction_of_ideal is None:
        return _figure(words.UNKNOWN, what, found.ideal.why or found.best.why)
    how = _describe_sources(found.best, "all GPUs alone", found.ideal)
    return _figure(words.format_fraction(found.fraction_of_ideal), what, how)


def _describe_sources(here: StepSpeed, name: str, other: StepSpeed) -> str:
    """Describe both sides of a comparison, with the speed of the side `name`."""
    rate = words.format_token_rate(other.tokens_per_s)
    if here.source == other.source:
        return f"both {here.source}; {name}: {rate}"
    return f"this run {here.source}; {name}: {rate}, {other.source}"


def _bars(found: RunSpeeds) -> Markup | None:
    rows = [
        ("this run", found.measured, "measured"),
        ("this plan", found.predicted, "predicted"),
        ("even split", found.even, found.even.source),
        ("all GPUs alone", found.ideal, found.ideal.source),
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
    picture = draw_picture(title, 16, draw_bar(0, part, y=0, height=16, class_=class_, title=title))
    return render_row(name, picture, [told, " ", el("em", speed.source)], "row")


def _note(facts: RunFacts) -> str:
    steps = facts.figures.counted_steps
    parts = []
    if steps:
        earlier = " or by an earlier plan" if find_last_other_plan_step(facts.run.history) else ""
        parts.append(
            f"Measured: tokens of a mean step over the time of the median one, of the last "
            f"{format_count(steps, 'step')} that are not the first after a start{earlier}."
        )
    known = "datasheets of the GPUs" if facts.estimated else "the profile of each GPU type"
    parts.append(f"Predicted: by the cost model, from {known}.")
    parts.append(
        "All GPUs alone: the sum over the GPUs of the cluster, each computing without pauses in "
        "its fastest mode, with no communication and enough memory."
    )
    return " ".join(parts)
