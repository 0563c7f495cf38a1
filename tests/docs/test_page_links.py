"""Links between the pages lead somewhere."""

from __future__ import annotations

import re

import pytest

from helpers.pages import PAGES, ROOT, anchors, links

LINKS = [
    (page, target)
    for page in PAGES
    if page.parent.name != "parts"  # beginnings: their links count from the page that they begin
    for target in links(page)
]


@pytest.mark.parametrize(
    ("page", "target"), LINKS, ids=[f"{p.relative_to(ROOT)}->{t}" for p, t in LINKS]
)
def test_a_link_leads_somewhere(page, target):
    file, _, anchor = target.partition("#")
    there = (page.parent / file).resolve() if file else page
    assert there.exists()
    if anchor:
        assert anchor in anchors(there)


def files_named(page):
    """The files of this project that the text names, such as `engine/engine.py`."""
    return re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|md))`", page.read_text(encoding="utf-8"))


FILES = [(page, name) for page in PAGES for name in sorted(set(files_named(page)))]


@pytest.mark.parametrize(("page", "name"), FILES, ids=[f"{p.name}-{n}" for p, n in FILES])
def test_a_file_that_is_named_exists(page, name):
    assert (ROOT / name).is_file() or (ROOT / "src" / "gpumix" / name).is_file()
