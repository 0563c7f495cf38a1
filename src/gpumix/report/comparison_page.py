"""The page of two runs: speeds, losses, memory, and the differences of plans and jobs."""

from __future__ import annotations

from collections.abc import Sequence

from gpumix.report.comparison import ComparedRow, RunComparison
from gpumix.report.draw import draw_bar, draw_legend, draw_picture
from gpumix.report.facts import RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.report.page import describe_state, render_document
from gpumix.report.parts.curves import CurveLine, draw_chart, make_loss_line
from gpumix.report.parts.section import (
    render_gap,
    render_labels,
    render_remark,
    render_row,
    render_section,
    render_table,
)
from gpumix.train.run_figures import words

BARS, LINES, DOTS = ("measured", "bar-b"), ("line-measured", "line-b"), ("dot-measured", "dot-b")
MOST = 0.985  # fraction of the width taken by the longest bar


def render_comparison(found: RunComparison) -> str:
    """Return the comparison as HTML."""
    title = f"{found.names[0]} and {found.names[1]}"
    parts = (
        _render_speeds(found),
        _render_curves(found),
        _render_memory(found),
        _render_rows(found, "figures", "All figures", found.figures, numbers=1),
        _render_rows(found, "plans", "Differences of the plans", found.plans),
        _render_rows(found, "jobs", "Differences of the jobs", found.jobs),
    )
    return render_document(title, _render_header(found), parts)


def _both(found: RunComparison) -> Sequence[tuple[str, RunFacts]]:
    return list(zip(found.names, (found.first, found.second)))


def _render_header(found: RunComparison) -> list[Markup]:
    lines = [
        el(
            "p",
            el("strong", name),
            [f" · {text}" for text in _describe_run(facts) if text],
            " ",
            render_labels(facts),
            class_="stand",
        )
        for name, facts in _both(found)
    ]
    return [
        el("p", "gpumix report of two runs", class_="eyebrow"),
        el("h1", f"{found.names[0]} and {found.names[1]}"),
        el("p", found.verdict, class_="headline"),
        *lines,
    ]


def _describe_run(facts: RunFacts) -> Sequence[str]:
    run, progress = facts.run, facts.run.progress
    state = describe_state(progress)
    return run.model, state, words.format_progress(progress.step, progress.steps)


def _render_speeds(found: RunComparison) -> Markup:
    rates = [facts.answer.best.tokens_per_s or 0.0 for _, facts in _both(found)]
    longest = max(rates)
    if not longest:
        return render_section("answer", "How fast", render_remark("No step is done yet."))
    rows = []
    for (name, facts), rate, class_ in zip(_both(found), rates, BARS):
        best = facts.answer.best
        told = words.format_token_rate(best.tokens_per_s)
        drawn = draw_bar(0, MOST * rate / longest, y=0, height=16, class_=class_)
        about: list[Child] = [told, " ", best.source]
        if gap := render_gap(facts.figures):
            about += [", ", gap]
        rows.append(render_row(name, draw_picture(f"{name}: {told}", 16, drawn), about))
    return render_section("answer", "How fast", rows)


def _render_curves(found: RunComparison) -> Markup:
    losses, speeds = [], []
    for (name, facts), line, dot in zip(_both(found), LINES, DOTS):
        history = facts.run.history
        if not history.steps:
            continue
        losses.append(make_loss_line(history.steps, line, name))
        if history.evaluations:
            losses.append(make_loss_line(history.evaluations, dot, f"{name}, validation", "dot"))
        rate = words.format_number(facts.answer.measured.tokens_per_s)
        points = [(one.step, one.tokens_per_s) for one in history.steps]
        speeds.append(CurveLine(points, line, name, f"{rate} in a median step"))
    if not speeds:
        return render_section("curves", "Loss and speed", render_remark("No step is done yet."))
    charts = [
        draw_chart("Loss", losses, (), from_zero=False),
        draw_chart("Tokens/s", speeds, (), from_zero=True),
    ]
    return render_section("curves", "Loss and speed", el("div", charts, class_="charts"))


def _render_memory(found: RunComparison) -> Markup:
    types = dict.fromkeys(one.device_class for _, facts in _both(found) for one in facts.classes)
    peaks = [
        (f"{kind} in {name}", one.peak_bytes, class_)
        for kind in types
        for (name, facts), class_ in zip(_both(found), BARS)
        for one in facts.classes
        if one.device_class == kind and one.peak_bytes
    ]
    if not peaks:
        return render_section("memory", "Memory", render_remark("No peak is measured yet."))
    most = max(peak for _, peak, _ in peaks)
    rows = [
        render_row(
            name,
            draw_picture(name, 16, draw_bar(0, MOST * peak / most, y=0, height=16, class_=class_)),
            words.format_bytes(peak),
        )
        for name, peak, class_ in peaks
    ]
    entries = list(zip(BARS, found.names))
    lead = "Measured peak of the fullest GPU of each type."
    return render_section("memory", "Memory", draw_legend(entries), rows, lead=lead)


def _render_rows(
    found: RunComparison, name: str, heading: str, rows: Sequence[ComparedRow], *, numbers: int = 0
) -> Markup:
    if not rows:
        why = _explain_no_jobs(found) if name == "jobs" else "There are none."
        return render_section(name, heading, render_remark(why))
    differs = any(row.difference for row in rows)
    head = ["", *found.names, *(["difference"] if differs else [])]
    cells = [
        [row.what, el("span", row.first), el("span", row.second)]
        + ([row.difference] if differs else [])
        for row in rows
    ]
    caption = f"{found.names[0]} and {found.names[1]}"
    return render_section(name, heading, render_table(caption, head, cells, numbers=numbers))


def _explain_no_jobs(found: RunComparison) -> str:
    records = [facts.run.record for _, facts in _both(found)]
    if any(record is None or record.script is not None for record in records):
        return "Unknown: at least one of the runs has no job."
    return "There are none."
