"""The picture of the README: its words are its numbers, light and dark alike; it is not high."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from helpers.pages import ROOT

sys.path.append(str(ROOT / "docs"))

from parts import hero

SVG = "{http://www.w3.org/2000/svg}"
SPEEDS = (hero.Speed("even split", 500.0), hero.Speed("gpumix", 1000.0))
SHARES = (hero.Share("a-0", 0.75, 0.25), hero.Share("b-0", 0.25, 0.75))


def texts(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return [found.text or "" for found in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("dark", [False, True])
def test_bars_and_cards_have_their_lengths(dark):
    picture = hero.svg(SPEEDS, SHARES, dark=dark)
    root = ElementTree.fromstring(picture)
    assert float(root.attrib["height"]) <= 320
    bars = [r for r in root.iter(f"{SVG}rect") if r.attrib["height"] == str(hero.BAR_HEIGHT)]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-3)
    assert {"500", "1,000", "75%", "25%", "a-0", "b-0"} <= set(texts(picture))
    for found in root.iter(f"{SVG}rect"):
        assert float(found.attrib["x"]) + float(found.attrib["width"]) <= hero.WIDTH


def test_the_readme_says_what_its_picture_shows():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ((source, words),) = re.findall(r'<img src="([^"]+)" alt="([^"]+)">', readme)
    dark = re.search(r'srcset="([^"]+)"', readme)
    pictures = [(ROOT / name).read_text(encoding="utf-8") for name in (source, dark[1])]
    for picture in pictures:
        title = ElementTree.fromstring(picture).find(f"{SVG}title")
        assert title.text == words
    assert texts(pictures[0]) == texts(pictures[1])


def test_the_pictures_are_those_of_the_results(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "pictures.py"), "--to", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f'alt="{done.stdout.strip()}"' in (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("plan-light.svg", "plan-dark.svg"):
        made, there = tmp_path / name, ROOT / "docs" / "images" / name
        assert made.read_text(encoding="utf-8") == there.read_text(encoding="utf-8")
