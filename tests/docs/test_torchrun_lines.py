"""Every torchrun line of the pages is known, and what it starts is run by a test that it names.

Those tests start fewer processes, on this host, and their own jobs; the options are the page's.
"""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import pytest

from helpers.pages import PAGES, ROOT, blocks, commands, marked
from helpers.scripts.changed_imports import BY_TORCHRUN

RENDEZVOUS = "--rdzv-backend gpumix --rdzv-endpoint host-a:29500"
HOSTS = f"torchrun --nnodes 2 --nproc-per-node 4 {RENDEZVOUS} -m gpumix"
SCRIPTS = "tests/examples/test_changed_imports.py"
# The file of its test.
TESTS = {
    f"{HOSTS} train job.yaml": "tests/train/processes/test_torchrun.py",
    f"{HOSTS} check job.yaml": "tests/cli/verbs/test_check_verb.py",
    f"torchrun --nnodes 1:4 --max-restarts 100 --nproc-per-node 4 {RENDEZVOUS} -m gpumix train "
    "job.yaml": "tests/train/elastic/test_elastic_hosts.py",
    "torchrun --nproc-per-node 2 examples/run_clm.py --output_dir runs/clm": SCRIPTS,
    "torchrun --nproc-per-node 3 train.py": "tests/launch/test_on_this_host.py",
}
SHOWN = {
    shlex.join(words)
    for page in PAGES
    for block in blocks(page)
    if not marked(block)
    for words in commands(block)
    if words[0] == "torchrun"
}


def test_each_line_has_its_test():
    assert TESTS.keys() == SHOWN


@pytest.mark.parametrize("line", sorted(TESTS))
def test_that_test_starts_it(line):
    """Programs of the examples by name; else one function has all its options and its verb."""
    words = shlex.split(line)
    if TESTS[line] == SCRIPTS:
        (program,) = [Path(word) for word in words if word.endswith(".py")]
        assert program.stem in BY_TORCHRUN
        return
    wanted = {"torch.distributed.run", *(word for word in words if word.startswith("--"))}
    if "-m" in words:
        wanted |= {"-m", *words[words.index("-m") + 1 :][:2]}
    assert any(wanted <= said for said in said_by_tests((ROOT / TESTS[line]).read_text("utf-8")))


def said_by_tests(text: str) -> list[set[str]]:
    """Of each test in a file the words that it has, and the functions and constants that it names;
    what is written about them is left out."""
    tree = ast.parse(text)
    parts = {name: node for node in tree.body for name in names_of(node)}
    tests = [name for name in parts if name.startswith("test_")]
    return [set().union(*map(words_in, reached(name, parts))) for name in tests]


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def reached(name: str, parts: dict[str, ast.stmt]) -> list[ast.stmt]:
    """A part of a file, and all that it names, and that these name."""
    seen = {}
    following = [name]
    while following:
        one = following.pop()
        if one in parts and one not in seen:
            seen[one] = parts[one]
            following += [n.id for n in ast.walk(parts[one]) if isinstance(n, ast.Name)]
    return list(seen.values())


def words_in(node: ast.stmt) -> set[str]:
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Expr)]
    told = [n for n in ast.walk(node) if isinstance(n, ast.Constant) and n not in texts]
    return {one.value for one in told if isinstance(one.value, str)}


def test_what_is_only_written_about_starts_nothing():
    text = '"""--faster"""\nA = ["-m"]\ndef test_it():\n    """--slow"""\n    run([*A, "--new"])'
    assert said_by_tests(text) == [{"-m", "--new"}]
