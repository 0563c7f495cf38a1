"""The report page: one offline file, without scripts and external resources."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

import gpumix
from gpumix.report import words
from gpumix.report.draw import draw_bar, draw_picture
from gpumix.report.events import ENDED_EARLY
from gpumix.report.facts import RunFacts
from gpumix.report.html import Markup, el
from gpumix.report.parts.answer import render_speeds
from gpumix.report.parts.cluster_picture import render_cluster
from gpumix.report.parts.compared import render_prediction_errors
from gpumix.report.parts.curves import render_curves
from gpumix.report.parts.happened import render_events
from gpumix.report.parts.memory_bars import render_memory
from gpumix.report.parts.plan_picture import render_plan
from gpumix.report.parts.reproduce import render_instructions
from gpumix.report.parts.section import render_labels
from gpumix.report.parts.spent import render_time_shares
from gpumix.report.parts.timeline import render_timeline
from gpumix.report.run import Progress, Run
from gpumix.schema.errors import InputError
from gpumix.schema.files import open_for_reading, read_text, replace_text

PARTS = (
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
    "training": "under way",
    "restarting": "starting again",
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
    name = run.folder.resolve().name
    body = el(
        "body",
        el("header", _render_header(facts, name)),
        el("main", (part(facts) for part in PARTS)),
        el("footer", el("p", f"Written by gpumix {gpumix.__version__}.")),
    )
    return f"<!doctype html>\n{el('html', _render_head(name), body, lang='en')}\n"


def _render_head(name: str) -> Markup:
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
        el("title", f"{name}: gpumix report"),
        el("style", Markup(style)),
    )


@cache
def _read_style() -> str:
    found = read_text(Path(__file__).with_name("style.css"))
    assert "</" not in found, "nothing may end the style early"
    return found


def _render_header(facts: RunFacts, name: str) -> list[Markup]:
    run = facts.run
    progress = run.progress
    devices = ", ".join(f"{one.devices} × {one.device_class}" for one in facts.classes)
    done = 0.0 if not progress.steps else progress.step / progress.steps
    how = words.format_progress(progress.step, progress.steps)
    parts = [
        el("p", "gpumix run", class_="eyebrow"),
        el("h1", name),
        el(
            "p",
            el("span", describe_state(progress), class_=f"state {progress.state}"),
            f" {how}",
            f", loss {progress.loss:.4f}" if progress.loss is not None else "",
            f", {_describe_remaining(facts)}" if _describe_remaining(facts) else "",
            class_="stand",
        ),
        el("p", devices, " ", render_labels(facts), class_="devices"),
    ]
    if progress.steps:
        parts.append(
            draw_picture(
                how,
                6,
                draw_bar(0, 1, y=0, height=6, class_="track"),
                draw_bar(0, done, y=0, height=6, class_="c0"),
                class_="done",
            )
        )
    if progress.why and progress.state in ("failed", "interrupted", "restarting"):
        parts.append(el("p", progress.why, class_="why"))
    return parts


def _describe_remaining(facts: RunFacts) -> str:
    progress = facts.run.progress
    if not progress.live:
        return ""
    if progress.silent_s() > SILENT_S:
        return f"nothing heard for {words.format_seconds(progress.silent_s())}: it may be no more"
    return f"{words.format_seconds(progress.remaining_s)} left" if progress.remaining_s else ""


def write_page(run: Run, path: Path) -> None:
    """Write a run's report to `path`, atomically.

    Raises:
        InputError: `path` is a folder, or a file not written by gpumix report.
        MachineError: writing fails.
    """
    made = render_page(run)
    if path.is_dir() or (path.exists() and GENERATOR not in _read_beginning(path)):
        raise InputError(
            "this is no report, and is not overwritten",
            where=str(path),
            fix="write elsewhere: --output report.html",
        )
    elsewhere = "write elsewhere: --output report.html"
    replace_text(path, made, cannot="cannot write the report", fix=elsewhere)


def _read_beginning(path: Path) -> str:
    try:
        with open_for_reading(path) as file:
            return file.read(4096).decode("utf-8", errors="replace")
    except OSError:
        return ""
