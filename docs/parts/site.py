"""The pages as a site: what mkdocs is told beside mkdocs.yml.

Pages link to each other as files of the repository, so that they can be read there. In the site
docs/ is the top, README.md its first page, and other files that pages link to go along.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
GO_ALONG = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "benchmarks/*.py",
    "examples/README.md",
    "examples/*.py",
    "examples/*.yaml",
    "examples/*.ipynb",
)
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE.txt",
}
LINK = re.compile(r"""(\]\(|\bsrc="|\bsrcset=")([^)\s"#:]+)""")


def on_files(files: Files, config: Any) -> Files:
    """Takes in what lies outside of docs/."""
    for pattern in GO_ALONG:
        for path in sorted(ROOT.glob(pattern)):
            name = place(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""
    own = origin(page.file.src_uri)
    folder = PurePosixPath(own).parent

    def there(found: re.Match[str]) -> str:
        target = os.path.normpath(folder / found[2])
        if not (ROOT / target).is_file():
            return found[0]  # no link: code looks like that too
        start = PurePosixPath(page.file.src_uri).parent
        return found[1] + PurePosixPath(os.path.relpath(place(target), start)).as_posix()

    return LINK.sub(there, markdown)


def place(name: str) -> str:
    """Where a file of the repository is in the site."""
    return ELSEWHERE.get(name, name.removeprefix("docs/"))


def origin(name: str) -> str:
    """Where a file of the site is in the repository."""
    back = {there: here for here, there in ELSEWHERE.items()}
    if name in back:
        return back[name]
    inside = f"docs/{name}"
    return inside if (ROOT / inside).is_file() else name
