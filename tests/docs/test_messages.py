"""Messages and exit codes of the troubleshooting page are those that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from gpumix.schema import errors
from helpers.pages import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "src" / "gpumix"


def rows(title: str) -> list[str]:
    """The first cells of the table of a section."""
    section = PAGE.partition(f"## {title}")[2].partition("\n## ")[0]
    return re.findall(r"(?m)^\| (?!code|message)([^|-][^|]*) \|", section)


@cache
def source() -> str:
    """The code as it is written: texts of several lines are joined, with a gap for each value."""
    files = sorted(PACKAGE.rglob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r"\{[^{}\n]*\}", "...", re.sub(r'"\s*\n\s*f?"', "", text))


@cache
def written() -> str:
    return "\n".join(texts())


def texts() -> Iterator[str]:
    """What the code says, with a gap for each value that is put in."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                yield "".join(str(part) for part in parts)


SECTIONS = re.findall(r"(?m)^## (.*\(code \d\))$", PAGE)
MESSAGES = [
    message
    for title in SECTIONS
    for cell in rows(title)
    for message in re.findall("`([^`]+)`", cell)
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_that_the_code_has(message):
    known = message in source() or message in written()  # to parse all takes long
    assert known, "the message has changed: change the page"


def test_there_are_messages_of_each_code():
    assert len(SECTIONS) == 4 and len(MESSAGES) > 30


def test_every_exit_code_is_there():
    codes = {int(code) for code in rows("By exit code")}
    known = [errors.GpumixError, *errors.GpumixError.__subclasses__()]
    assert codes == {errors.EXIT_OK, *(kind.exit_code for kind in known)}
