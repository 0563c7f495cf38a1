"""Colours of the page: one meaning each, and seen against what lies behind them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpumix.report import page
from gpumix.report.draw import TONES, TYPE_COLORS

STYLE = (Path(page.__file__).parent / "style.css").read_text()
MARKS = [f"t{n}" for n in range(TYPE_COLORS)]
MARKS += ["ink", "wait", "communication", "data", "copies", "rest", "run-b", "bad", "edge", "soft"]
BACKGROUNDS = ("paper", "box", "track")
LEAST_MARK, LEAST_TEXT = 3.0, 4.5  # of WCAG 2.2: 1.4.11 and 1.4.3


def variables(dark: bool) -> dict[str, str]:
    light_part, _, dark_part = STYLE.partition("@media (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light_part))
    if dark:
        own = dark_part.partition("\n}\n")[0]
        found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", own))
    return found


def channels(color: str) -> list[float]:
    return [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]


def luminance(rgb: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ratio(one: list[float], other: list[float]) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_ratio_is_that_of_the_standard():
    assert ratio(channels("#000000"), channels("#ffffff")) == pytest.approx(21)
    assert ratio(channels("#777777"), channels("#ffffff")) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("dark", [False, True])
def test_marks_are_seen_against_each_background(dark):
    known = variables(dark)
    for name in MARKS:
        for behind in BACKGROUNDS:
            found = ratio(channels(known[name]), channels(known[behind]))
            assert found >= LEAST_MARK, (name, behind, round(found, 2))


@pytest.mark.parametrize("dark", [False, True])
def test_tones_of_a_colour_are_seen_too(dark):
    """A tone is a colour mixed with ink."""
    parts = re.findall(r"\.tone\d \{ fill: color-mix\(in srgb, var\(--hue\) (\d+)%", STYLE)
    assert len(parts) == TONES - 1
    known = variables(dark)
    ink = channels(known["ink"])
    for part in (int(text) / 100 for text in parts):
        for name in (f"t{n}" for n in range(TYPE_COLORS)):
            mixed = [part * c + (1 - part) * i for c, i in zip(channels(known[name]), ink)]
            for behind in BACKGROUNDS:
                assert ratio(mixed, channels(known[behind])) >= LEAST_MARK, (name, part, behind)


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_read_on_each_background(dark):
    known = variables(dark)
    for name in ("ink", "soft", "bad", "run-b"):
        for behind in BACKGROUNDS:
            found = ratio(channels(known[name]), channels(known[behind]))
            assert found >= LEAST_TEXT, (name, behind, round(found, 2))


@pytest.mark.parametrize("dark", [False, True])
def test_no_colour_of_a_mark_is_used_twice(dark):
    known = variables(dark)
    assert len({known[name] for name in MARKS}) == len(MARKS)


def test_dark_pages_have_each_colour_of_light_ones():
    own = STYLE.partition("@media (prefers-color-scheme: dark)")[2].partition("\n}\n")[0]
    assert set(re.findall(r"--([\w-]+): #", own)) == set(variables(dark=False))


def test_every_variable_is_known():
    used = set(re.findall(r"var\(--([\w-]+)\)", STYLE))
    assert used - {"hue"} <= set(variables(dark=False))
