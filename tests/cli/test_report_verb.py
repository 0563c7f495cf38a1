"""`gpumix report`: a page, and its numbers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import webbrowser

import pytest
from verbs import gpumix, refused


def test_the_page_lies_in_the_runs_folder(run):
    done = gpumix("report", run)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"report: {run / 'report.html'}\n"
    text = (run / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert "2,048 tokens/s" in text


def test_it_goes_elsewhere_if_asked(run, tmp_path):
    before = sorted(run.iterdir())
    assert gpumix("report", run, "--output", tmp_path / "mine.html").exit_code == 0
    assert (tmp_path / "mine.html").exists()
    assert sorted(run.iterdir()) == before


def test_json_has_the_numbers_of_the_page(run):
    done = gpumix("report", run, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["answer"]["measured"]["tokens_per_s"] == pytest.approx(2048.0)
    assert found["answer"]["against_even"] == pytest.approx(
        found["answer"]["even"]["step_s"] / found["answer"]["measured"]["step_s"]
    )
    assert sum(group["samples"] for group in found["groups"]) == 8
    text = (run / "report.html").read_text(encoding="utf-8")
    assert found["report"] == str(run / "report.html")
    assert f"{found['answer']['of_ideal']:.0%}" in text
    assert found["plan"] in text


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


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.mark.skipif(CHROMIUM is None, reason="no browser is here")
@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_shows_it_and_refuses_nothing(run, tmp_path, width):
    """Styles apply under the page's own policy, and nothing is wider than the window."""
    assert gpumix("report", run).exit_code == 0
    shot = tmp_path / "shot.png"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'browser'}", f"--window-size={width},900",
        "--enable-logging=stderr", "--virtual-time-budget=1000", f"--screenshot={shot}",
        (run / "report.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shot.stat().st_size > 10_000, done.stderr  # a blank page has a tenth of that
    assert not re.search(r"CONSOLE|Refused|Content Security Policy", done.stderr)
