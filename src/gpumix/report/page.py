"""The report page: one offline file, without scripts and external resources."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

import gpumix
from gpumix.report.draw import draw_bar, draw_picture
from gpumix.report.events import ENDED_EARLY
from gpumix.report.facts import RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.report.parts.advice import render_advice
from gpumix.report.parts.cluster_picture import render_cluster
from gpumix.report.parts.curves import render_curves
from gpumix.report.parts.event_list import render_events
from gpumix.report.parts.memory_bars import render_memory
from gpumix.report.parts.plan_picture import render_plan
from gpumix.report.parts.prediction_errors import render_prediction_errors
from gpumix.report.parts.reproduce import render_instructions
from gpumix.report.parts.section import render_gap, render_labels
from gpumix.report.parts.speeds import render_speeds
from gpumix.report.parts.time_shares import render_time_shares
from gpumix.report.parts.timeline import render_timeline
from gpumix.report.run import Progress, Run
from gpumix.schema.errors import InputError
from gpumix.schema.files import open_for_reading, read_text, replace_text
from gpumix.train.run_figures import words

PARTS = (
    render_advice,
    render_speeds,
    render_cluster,
    render_plan,
    render_memory,
    render_timeline,
    render_curves,
    render_prediction_errors,
    render_time_shares,
    render_events,
    render_instructions,
)
GENERATOR = "gpumix report"
STATES = {
    "planned": "planned, not trained",
    "training": "running",
    "restarting": "restarting",
    "interrupted": "stopped",
    "failed": "failed",
    "finished": "finished",
}
SILENT_S = 120.0  # silence after which an active run may be dead


def describe_state(progress: Progress) -> str:
    """Describe a run's state in a few words."""
    return ENDED_EARLY.lower() if progress.ended_early else STATES[progress.state]


def render_page(run: Run) -> str:
    """Return a run's report as HTML."""
    facts = RunFacts(run)
    title = f"{run.name}: {run.model}" if run.model else run.name
    return render_document(title, _render_header(facts), (part(facts) for part in PARTS))


def render_document(title: str, header: Child, main: Child) -> str:
    """Return a complete page: one file, offline."""
    body = el(
        "body",
        el("header", header),
        el("main", main),
        el("footer", el("p", f"Written by gpumix {gpumix.__version__}.")),
    )
    return f"<!doctype html>\n{el('html', _render_head(title), body, lang='en')}\n"


def _render_head(title: str) -> Markup:
    style = _read_style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="generator", content=f"{GENERATOR} {gpumix.__version__}"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title} · gpumix report"),
        el("style", Markup(style)),
    )


@cache
def _read_style() -> str:
    found = read_text(Path(__file__).with_name("style.css"))
    assert "</" not in found, "nothing may end the style early"
    return found


def _render_header(facts: RunFacts) -> list[Markup]:
    run = facts.run
    progress = run.progress
    devices = ", ".join(f"{one.devices} × {one.device_class}" for one in facts.classes)
    done = 0.0 if not progress.steps else progress.step / progress.steps
    how = words.format_progress(progress.step, progress.steps)
    left = _describe_remaining(facts)
    loss = "" if progress.loss is None else f"loss {progress.loss:.4f}"
    parts = [
        el("p", "gpumix report", class_="eyebrow"),
        el("h1", run.name, el("span", f" {run.model}", class_="model") if run.model else None),
        el(
            "p",
            el("span", describe_state(progress), class_=f"state {progress.state}"),
            (f" · {text}" for text in (how, loss, left) if text),
            class_="stand",
        ),
        el("p", _render_headline(facts), class_="headline"),
        el("p", devices, " ", render_labels(facts), class_="devices"),
    ]
    if progress.steps:
        parts.append(
            draw_picture(
                how,
                8,
                draw_bar(0, 1, y=0, height=8, class_="track"),
                draw_bar(0, done, y=0, height=8, class_="measured"),
                class_="done",
            )
        )
    return parts


def _render_headline(facts: RunFacts) -> list[Child]:
    """Return speed, gain and distance from the plan."""
    answer = facts.answer
    found: list[Child] = []
    if answer.best:
        source = "" if answer.measured else " (predicted)"
        rate = words.format_token_rate(answer.best.tokens_per_s)
        found.append([el("strong", rate), source])
    if answer.speedup_over_even is not None:
        factor = words.format_factor(answer.speedup_over_even)
        found.append(f"{factor} an even split ({answer.even.source})")
    if gap := render_gap(facts.figures):
        found.append(gap)
    return [[" · " if number else "", one] for number, one in enumerate(found)]


def _describe_remaining(facts: RunFacts) -> str:
    progress = facts.run.progress
    if not progress.live:
        return ""
    if progress.silent_s() > SILENT_S:
        return f"no news for {words.format_seconds(progress.silent_s())}: it may have been killed"
    return words.format_remaining(facts.figures.remaining_s)


def write_page(run: Run, path: Path) -> None:
    """Write a run's report to `path`, atomically.

    Raises:
        InputError: `path` is a folder, or a file not written by gpumix report.
        MachineError: writing fails.
    """
    write_document(render_page(run), path)


def write_document(page: str, path: Path) -> None:
    """Write a page to `path`; see `write_page`."""
    if path.is_dir() or (path.exists() and GENERATOR not in _read_beginning(path)):
        raise InputError(
            "this is not a report, and is not overwritten",
            code="not-a-report",
            where=str(path),
            fix="write elsewhere: --output report.html",
        )
    elsewhere = "write elsewhere: --output report.html"
    replace_text(path, page, cannot="cannot write the report", fix=elsewhere)


def _read_beginning(path: Path) -> str:
    try:
        with open_for_reading(path) as file:
            return file.read(4096).decode("utf-8", errors="replace")
    except OSError:
        return ""
