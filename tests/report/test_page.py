"""The page: whole, alone, and nothing but text where text comes from a folder."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from gpumix.report.page import render_page, write_page
from gpumix.report.run import read_run
from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.plan.plan import Plan
from helpers.errors import raises
from helpers.runs.folders import (
    PARTS,
    check_alone,
    event_line,
    planned,
    read,
    run_of,
    step_line,
    write_run,
)

HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    "</style><style>*{display:none}</style>",
    "</title><base href=//evil.example>",
    "<!-- <![CDATA[ &lt;b&gt; &amp; ]]>",
    "javascript:alert(1)",
]
UNSHOWABLE = ["a\x00b", "gpu\u202e0-upg", "\ud800", "\x1b[31m"]


def hostile_run(folder, name: str):
    """A run in which all that is text is this."""
    told = json.dumps(planned().model_dump(mode="json"))
    plan = json.loads(told.replace('"quick-0"', json.dumps(name)))
    plan["strategy"] = name
    lines = [step_line(n) for n in range(1, 4)]
    rank = {"device": name, "share": 0.5, "limit": name}
    lines += [
        event_line("restart", 2, resumed_from=1, why=name, decided=name, seconds=1.0),
        event_line("checkpoint", 2, path=name, seconds=1.0, stalled_s=0.0),
        event_line("plan", 2, live=True, samples={name: 2}, samples_before={name: 1}, why=name),
        event_line("plan", 2, modes={name: name}, modes_before={name: 1}, strategy=name),
        event_line("input-bound", 2, ranks=[rank]),
        event_line("norm-spike", 2, device=name, times=20.0, others=1.0),
        event_line("replay", 2, devices=[name], deviation=0.5, sure=True, where=name),
        event_line(name, 2, **{name: name}),
        event_line("classes", 3, classes=[{"device_class": name, "planned_memory": {name: 5}}]),
        event_line("ranks", 3, ranks=[{"device": name, "device_class": name}]),
    ]
    write_run(folder, lines, plan=Plan.model_validate(plan), state="failed", why=name)
    record = {
        "kind": "run", "schema_version": 1, "started_at": 1.7e9, "gpumix": name, "python": name,
        "platform": name, "packages": {name: name}, "folder": name,
        "given": {"model": {"factory": name}}, "job": {"model": {"factory": f"{name}:f"}},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    return read_run(folder)


def test_the_policy_allows_its_own_style_and_nothing_else(tmp_path):
    text = render_page(run_of(tmp_path))
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    told = dict(part.strip().split(" ", 1) for part in policy.replace("&#x27;", "'").split(";"))
    assert told.pop("style-src") == f"'sha256-{digest}'"
    assert set(told.values()) == {"'none'"}
    assert "default-src" in told
    assert "url(" not in style and "@import" not in style
    assert text.index("Content-Security-Policy") < text.index("<style>")


@pytest.mark.parametrize("name", HOSTILE)
def test_text_of_a_folder_is_text_in_the_page(tmp_path, name):
    found = read(hostile_run(tmp_path / "run", name))
    check_alone(found)
    assert found.text.count(name) >= 10
    assert [a["id"] for a in found.named("section")] == PARTS


@pytest.mark.parametrize("name", UNSHOWABLE)
def test_what_no_page_can_show_is_replaced(tmp_path, name):
    run = run_of(tmp_path, [event_line("restart", 1, why=name)], state="failed", why=name)
    text = render_page(run)
    text.encode("utf-8")
    assert not re.search("[\x00-\x08\x1b\u202a-\u202e\ud800-\udfff]", text)
    assert "\ufffd" in text


def test_a_folders_name_is_text_too(tmp_path):
    found = read(run_of(tmp_path / '"><script>alert(1)<'))
    check_alone(found)
    assert '"><script>alert(1)<' in found.text


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "planned, not trained"),
        ("training", "running"),
        ("restarting", "restarting"),
        ("interrupted", "stopped"),
        ("failed", "failed"),
        ("finished", "finished"),
    ],
)
@pytest.mark.parametrize("steps", [0, 1, 30])
def test_every_state_has_a_page(tmp_path, state, said, steps):
    lines = [step_line(n, loss=3.0 / n) for n in range(1, steps + 1)]
    found = read(run_of(tmp_path, lines, state=state, steps=3, why="the disk is full"))
    assert said in found.text
    ended = state in ("restarting", "interrupted", "failed")
    assert ("the disk is full" in found.text) == ended
    running = state in ("training", "restarting")
    assert ("1 s left" in found.text) == (running and steps == 1)


def test_a_run_that_is_silent_is_said_to_be(tmp_path):
    found = read(run_of(tmp_path, [step_line(1)], state="training", time=1.7e9))
    assert "no news for" in found.text
    assert "it may have been killed" in found.text


def test_a_plan_without_anything_else_has_a_page(tmp_path):
    plan = planned().model_copy(update={"prediction": None, "reasons": None})
    plan.save(tmp_path / "plan.json")
    found = read(read_run(tmp_path))
    assert "the plan has no prediction" in found.text
    assert "cannot be simulated" in found.text


def test_lines_that_could_not_be_read_are_told(tmp_path):
    found = read(run_of(tmp_path, [step_line(1), step_line(2)[:30]], state="training"))
    assert "1 line of metrics.jsonl could not be read" in found.text


def test_many_steps_make_no_large_page(tmp_path):
    """Ten thousand points are drawn by some of them, the highest among these."""
    lines = [step_line(n, loss=50.0 if n == 7_777 else 2.0) for n in range(1, 10_001)]
    text = render_page(run_of(tmp_path, lines, state="training"))
    assert len(text) < 150_000
    assert re.search(r"<title>Loss over steps 1 to 10000", text)
    points = re.findall(r'<polyline points="([^"]*)"', text)[0].split()
    heights = [float(point.split(",")[1]) for point in points]
    assert len(heights) < 2_000
    assert min(heights) < 0.1 * max(heights)


@pytest.mark.parametrize(("loss", "steps"), [(0.0, 1), (1e30, 3), (1e-30, 3), (-2.0, 3)])
def test_curves_of_odd_losses_are_drawn(tmp_path, loss, steps):
    lines = [step_line(n, loss=loss) for n in range(1, steps + 1)]
    text = render_page(run_of(tmp_path, lines, state="training"))
    assert "nan" not in text.lower().replace("nan-", "")
    assert "inf" not in re.sub(r"[a-z]*inf[a-z]+|[a-z]+inf", "", text.lower())


# -- the file --------------------------------------------------------------------------------------


def test_a_report_replaces_a_report_and_nothing_else(tmp_path):
    run = run_of(tmp_path / "run")
    path = tmp_path / "new" / "report.html"
    write_page(run, path)
    write_page(run, path)
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    path.write_text("<!doctype html> my own page")
    with raises(InputError, code="not-a-report"):
        write_page(run, path)
    assert path.read_text() == "<!doctype html> my own page"
    with raises(InputError, code="not-a-report"):
        write_page(run, tmp_path)


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    run = run_of(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with raises(MachineError, code="file-not-writable", where="report.html"):
        write_page(run, tmp_path / "file" / "report.html")
