"""Codes of errors: every error has one, in kebab-case, of one exception class."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from helpers.paths import ROOT

SOURCES = ROOT / "src" / "gpumix"
KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
NODES = [
    (f"{file.relative_to(SOURCES)}:{node.lineno}", node)
    for file in sorted(SOURCES.rglob("*.py"))
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.Call | ast.ClassDef)
]


def get_name(node: ast.expr) -> str:
    """Return the last name of a dotted expression."""
    return getattr(node, "attr", getattr(node, "id", ""))


def find_error_classes() -> set[str]:
    """Return the names of the classes that derive from `GpumixError`."""
    bases = {
        node.name: set(map(get_name, node.bases))
        for _, node in NODES
        if isinstance(node, ast.ClassDef)
    }
    found = {"GpumixError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def get_texts(code: ast.expr) -> list[str]:
    """Return the possible codes of an expression that is literal in its branches."""
    if isinstance(code, ast.IfExp):
        return get_texts(code.body) + get_texts(code.orelse)
    return [code.value] if isinstance(code, ast.Constant) and isinstance(code.value, str) else []


CLASSES = find_error_classes()
CODES = [  # of each call of an error class, or with a code
    (place, get_name(node.func), {word.arg: word.value for word in node.keywords}.get("code"))
    for place, node in NODES
    if isinstance(node, ast.Call)
    and (get_name(node.func) in CLASSES or any(word.arg == "code" for word in node.keywords))
]


def test_every_error_has_a_code():
    assert {"InputError", "ModelError", "RankLost"} < CLASSES
    assert not [place for place, name, code in CODES if name in CLASSES and code is None]


def test_codes_are_in_kebab_case():
    texts = [(place, text) for place, _, code in CODES if code for text in get_texts(code)]
    assert not [(place, text) for place, text in texts if not KEBAB.fullmatch(text)]


def test_a_code_is_of_one_class():
    of = defaultdict(set)
    for _, name, code in CODES:
        for text in get_texts(code) if code and name in CLASSES else ():
            of[text].add(name)
    assert len(of) > 400
    assert not {code: names for code, names in of.items() if len(names) > 1}
