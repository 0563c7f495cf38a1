"""Run folders by hand, and pages as a reader sees them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from gpumix.planner.plan import plan as make_plan
from gpumix.report.page import render_page
from gpumix.report.run import Run, read_run
from gpumix.schema.plan.plan import Plan
from helpers.runs.verbs import measured

BATCH, STEP_S = 8, 0.5
PARTS = [
    "next",
    "answer",
    "cluster",
    "plan",
    "memory",
    "step",
    "curves",
    "compared",
    "spent",
    "events",
    "reproduce",
]


@cache
def planned() -> Plan:
    """Of two classes, three devices."""
    return make_plan(measured(), BATCH)


def step_line(step: int, loss: float = 2.0, step_s: float = STEP_S, samples: int = BATCH) -> str:
    tokens = samples * planned().sequence_length
    told = {
        "event": "step",
        "time": 1.7e9 + step,
        "step": step,
        "loss": loss,
        "learning_rate": 1e-3,
        "gradient_norm": 0.7,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "tokens": tokens * step,
        "shares": None,
        "samples": samples,
    }
    return json.dumps(told)


def event_line(event: str, step: int, **told: Any) -> str:
    return json.dumps({"event": event, "time": 1.7e9, "step": step, **told})


def write_run(
    folder: Path,
    lines: Sequence[str] = (),
    *,
    state: str | None = None,
    plan: Plan | None = None,
    **progress: Any,
) -> Path:
    """A run whose plan is `planned`, in `state`; without one it is only planned."""
    folder.mkdir(parents=True, exist_ok=True)
    (plan or planned()).save(folder / "plan.json")
    measured().save(folder / "profile.json")
    if lines:
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if state is not None:
        told = {"state": state, "why": "", "step": 3, "steps": 10, "loss": 2.0}
        told |= {"time": time.time()} | progress
        (folder / "progress.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


def run_of(folder: Path, lines: Sequence[str] = (), **progress: Any) -> Run:
    return read_run(write_run(folder, lines, **progress))


VOID = {"br", "hr", "meta", "link", "img", "input"}


@dataclass
class Read(HTMLParser):
    """A page as it is parsed: every tag with its attributes, and the text that is shown."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if len(dict(attrs)) != len(attrs):
            self.wrong.append(f"{tag} has an attribute twice")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing, or something else")

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read(run: Run) -> Read:
    """The page of a run, well-formed."""
    found = Read()
    found.feed(render_page(run))
    found.close()
    assert found.wrong == []
    assert found.open == []
    return found


def check_alone(found) -> None:
    """Nothing is asked for from elsewhere, nothing runs, and nothing but one style sheet styles."""
    for tag, attributes in found.tags:
        assert tag not in {
            "script",
            "link",
            "img",
            "iframe",
            "object",
            "embed",
            "base",
            "a",
            "form",
        }
        assert not {"src", "href", "srcset", "action", "style", "data"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on") or ":" in name], tag
    assert len(found.named("style")) == 1
