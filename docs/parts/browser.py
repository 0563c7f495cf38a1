"""A headless Chromium, by its command line: pictures of pages, and how large they are."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
BARE = "--hide-scrollbars"  # as on a phone, which draws them over the page
DARK, LIGHT = 0, 1  # as Blink counts what a reader prefers
# A page allows no script in it, so another one looks at it from outside.
FRAME = """<!doctype html>
<html><body style="margin:0">
<iframe id="seen" src="{page}" style="width:{width}px;height:100px;border:0"></iframe>
<script>
seen.onload = () => {{
  const page = seen.contentDocument.documentElement, window_ = seen.contentWindow;
  document.body.dataset.found = [page.scrollWidth, window_.innerWidth, page.scrollHeight,
    Number(window_.matchMedia("(prefers-color-scheme: dark)").matches)];
}};
</script></body></html>
"""


def chromium() -> str | None:
    """The program, if it is here."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass(frozen=True)
class Size:
    """Of a page in a window: what it needs, and what there is."""

    needs_width: int
    has_width: int
    height: int
    dark: bool


def size(page: Path, *, width: int, dark: bool) -> Size:
    """How a page fits into a window of so many pixels."""
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder, "frame.html")
        frame.write_text(FRAME.format(page=page.as_uri(), width=width), encoding="utf-8")
        looks = ("--disable-web-security", "--allow-file-access-from-files", "--dump-dom", BARE)
        done = _run(folder, dark, *looks, frame.as_uri())
    found = re.search(r'data-found="(\d+),(\d+),(\d+),(\d)"', done.stdout)
    assert found is not None, done.stderr
    needs, has, height, is_dark = map(int, found.groups())
    return Size(needs, has, height, bool(is_dark))


def picture(page: Path, to: Path, *, width: int, height: int, dark: bool) -> str:
    """Write what a window shows of a page; what the browser says beside."""
    with tempfile.TemporaryDirectory() as folder:
        window = (f"--window-size={width},{height}", f"--screenshot={to}", BARE)
        return _run(folder, dark, *window, "--enable-logging=stderr", page.as_uri()).stderr


def _run(folder: str, dark: bool, *options: str) -> subprocess.CompletedProcess[str]:
    program = chromium()
    assert program is not None, "there is no Chromium: apt-get install chromium"
    command = [
        *(program, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=1000"),
        *(f"--user-data-dir={folder}/browser", *options[:-1]),
        *(f"--blink-settings=preferredColorScheme={DARK if dark else LIGHT}", options[-1]),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
