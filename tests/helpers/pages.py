"""The pages for readers, and what is in them: code blocks, commands, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers.paths import ROOT

AT_THE_TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = [*AT_THE_TOP, ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (?P<why>[^>]{10,}) -->\n\n(?P<block>(?: {4}.*\n|\n)+)")
PROGRAMS = ("gpumix", "make", "pytest", "python", "torchrun")


@dataclass(frozen=True)
class Block:
    """A code block: fenced, or indented by four spaces; `line` is where it starts."""

    page: Path
    line: int
    text: str
    language: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of `page`."""
    lines = [*page.read_text(encoding="utf-8").splitlines(), ""]
    fenced, language = False, ""
    begun, found = 0, []
    for number, line in enumerate(lines, start=1):
        fence = line.startswith("```")
        inside = not fence and (fenced or line.startswith("    ") or (found and not line))
        if inside:
            begun = begun if found else number
            found.append(line if fenced else line[4:])
        elif found:
            yield Block(page, begun, "\n".join(found).rstrip() + "\n", language)
            found = []
        if fence:
            fenced, language = not fenced, "" if fenced else line[3:].strip()


def shown(page: str, language: str, part: str) -> str:
    """The only block of a page in `docs` that has such a part."""
    (found,) = [block for block in blocks(ROOT / "docs" / page) if part in block.text]
    assert found.language == language
    return found.text


def replaced(text: str, others: Mapping[str, str]) -> str:
    """With other words for some that it has."""
    for old, new in others.items():
        assert old in text
        text = text.replace(old, new)
    return text


def without_change(diff: str) -> str:
    """The lines before a diff."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("+"))


def with_change(diff: str) -> str:
    """The lines after it."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("-"))


def marked(block: Block) -> bool:
    """Whether the page says why a block is not run."""
    text = block.page.read_text(encoding="utf-8")
    said = (re.sub("(?m)^    ", "", found["block"]) for found in NOT_RUN.finditer(text))
    return any(block.text.strip() in one for one in said)


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of this project in a block; comments, and variables that are set
    for it, are left out."""
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
        if line.startswith(tuple(f"{program} " for program in PROGRAMS)):
            yield shlex.split(line, comments=True)


def inline_commands(page: Path) -> Iterator[list[str]]:
    """The same in the running text: `gpumix plan job.yaml`, often without its arguments."""
    prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    for code in re.findall(r"`([^`]+)`", " ".join(prose.split())):
        for command in code.split("&&"):
            if command.strip().startswith(tuple(f"{program} " for program in PROGRAMS)):
                yield shlex.split(command)


def links(page: Path) -> list[str]:
    """Where the links of `page` lead, those to other sites left out."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of `page` get."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
