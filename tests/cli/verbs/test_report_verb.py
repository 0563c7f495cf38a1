"""`gpumix report`: a page, and its numbers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import webbrowser

import pytest

from helpers.extended import every_second
from helpers.paths import DOCS
from helpers.runs.verbs import gpumix, refused

sys.path.append(str(DOCS))

from parts import browser


def test_the_page_lies_in_the_runs_folder(run):
    done = gpumix("report", run)
    assert done.exit_code == 0
    assert done.stderr == f"report: {run / 'report.html'}\n"
    assert "450K parameters" in done.stdout
    assert done.stdout == gpumix("top", run, "--once").stdout
    text = (run / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert "2,048 tokens/s" in text


def test_lines_that_could_not_be_read_are_told_beside_the_page(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{torn\n")
    done = gpumix("report", run)
    assert done.exit_code == 0
    assert "1 line of metrics.jsonl could not be read: the page does without them" in done.stderr


def test_it_goes_elsewhere_if_asked(run, tmp_path):
    before = sorted(run.iterdir())
    assert gpumix("report", run, "--output", tmp_path / "mine.html").exit_code == 0
    assert (tmp_path / "mine.html").exists()
    assert sorted(run.iterdir()) == before


def test_of_a_script_the_folder_that_it_writes_to_is_enough(run):
    inside = run / "out" / "gpumix"
    inside.mkdir(parents=True)
    for file in ("plan.json", "profile.json", "metrics.jsonl"):
        (run / file).rename(inside / file)
    assert gpumix("report", run / "out").stderr == f"report: {inside / 'report.html'}\n"
    assert gpumix("top", run / "out", "--json").exit_code == 0


def test_json_has_the_numbers_of_the_page(run):
    done = gpumix("report", run, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["answer"]["measured"]["tokens_per_s"] == pytest.approx(2048.0)
    assert found["answer"]["against_even"] == pytest.approx(
        found["answer"]["even"]["step_s"] / found["answer"]["predicted"]["step_s"]
    )
    assert sum(group["samples"] for group in found["groups"]) == 8
    text = (run / "report.html").read_text(encoding="utf-8")
    assert found["report"] == str(run / "report.html")
    assert f"{found['answer']['of_ideal']:.1%}" in text
    assert found["plan"] in text


def test_two_runs_are_compared(run, tmp_path):
    other = tmp_path / "second"
    shutil.copytree(run, other)
    done = gpumix("report", run, other)
    assert done.exit_code == 0
    assert done.stdout.startswith("both runs are equally fast")
    path = run / "comparison.html"
    assert done.stderr == f"report: {path}\n"
    assert "first and second" in path.read_text(encoding="utf-8")
    told = json.loads(gpumix("report", run, other, "--json", "-o", tmp_path / "x.html").stdout)
    assert [one["name"] for one in told["runs"]] == ["first", "second"]
    assert told["report"] == str(tmp_path / "x.html")
    assert "this is no run" in refused("report", run, tmp_path / "nothing")


def test_the_browser_is_opened_if_asked(run, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or False)
    done = gpumix("report", run, "--open")
    assert opened == [(run / "report.html").as_uri()]
    assert "no browser was found here" in done.stderr


def test_what_is_no_run_is_bad_input(tmp_path):
    assert "this is no run" in refused("report", tmp_path)
    assert "this is no run" in refused("top", tmp_path / "nothing")


def test_a_foreign_file_is_not_overwritten(run, tmp_path):
    (tmp_path / "mine.html").write_text("mine")
    assert "is not overwritten" in refused("report", run, "--output", tmp_path / "mine.html")


needs_browser = pytest.mark.skipif(browser.chromium() is None, reason="no browser is here")


@needs_browser
@pytest.mark.parametrize(("width", "dark"), every_second([(390, True), (1400, False)]))
def test_a_browser_shows_it_and_refuses_nothing(run, tmp_path, width, dark):
    """Styles apply under the page's own policy, and nothing is wider than the window."""
    assert gpumix("report", run).exit_code == 0
    size = browser.size(run / "report.html", width=width, dark=dark)
    assert size.needs_width <= size.has_width == width
    assert size.dark == dark
    shot = tmp_path / "shot.png"
    said = browser.picture(run / "report.html", shot, width=width, height=900, dark=dark)
    assert shot.stat().st_size > 10_000, said  # a blank page has a tenth of that
    assert not re.search(r"CONSOLE|Refused|Content Security Policy", said)


@pytest.mark.extended
@needs_browser
@pytest.mark.slow
def test_the_pictures_of_the_pages_are_made_from_a_run(run, tmp_path):
    script = DOCS / "pictures.py"
    command = [sys.executable, str(script), str(run), "--to", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.stat().st_size for path in tmp_path.glob("*.png")}
    shown = {path.name for path in (DOCS / "images").glob("*.png")} - {"strategies.png"}
    assert made.keys() == shown  # examples/four_strategies.py draws the other one
    assert min(made.values()) > 4_000
