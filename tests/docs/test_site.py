"""The documentation builds as a site without a warning, and loads nothing from other places."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.pages import ROOT

pytest.importorskip("material", reason='pip install ".[site]"')

LOADED = re.compile(r'<(?:script|img|source|iframe)[^>]*\bsrc(?:set)?="([^"]+)"|<link[^>]*>')


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site):
    """Those of docs/ where they are, README.md first."""
    docs = ROOT / "docs"
    pages = [p.relative_to(docs) for p in docs.rglob("*.md") if p.parent.name != "parts"]
    missing = [page for page in pages if not (site / page).with_suffix(".html").is_file()]
    assert not missing
    assert "close to their combined speed" in (site / "index.html").read_text(encoding="utf-8")
    assert not list(site.rglob("*.py*c")) and not (site / "parts").exists()


def test_nothing_is_loaded_from_other_places(site):
    for page in site.rglob("*.html"):
        for found in LOADED.finditer(page.read_text(encoding="utf-8")):
            loaded = found[1] or found[0]
            if 'rel="canonical"' not in loaded:
                assert "//" not in loaded, f"{page.name} loads {loaded}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", sheet.read_text(encoding="utf-8"))


def test_what_pages_name_in_markup_is_there(site):
    """Pictures of the README, which are no links of Markdown."""
    text = (site / "index.html").read_text(encoding="utf-8")
    pictures = re.findall(r'(?:src|srcset)="(images/[^"]+)"', text)
    assert len(pictures) == 2
    assert all((site / name).is_file() for name in pictures)


def test_files_that_pages_link_to_go_along(site):
    assert (site / "job.schema.json").is_file()
    assert (site / "examples" / "run_clm.py").is_file()
    assert (site / "benchmarks" / "results" / "2026-11-22.html").is_file()
