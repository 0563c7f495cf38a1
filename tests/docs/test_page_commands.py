"""Every command that the pages show exists, with the options that they show."""

from __future__ import annotations

import io
import re
import runpy
import sys
import tomllib
from argparse import ArgumentParser
from contextlib import redirect_stderr
from functools import cache
from importlib.util import find_spec
from unittest import mock

import pytest
import typer
from test_fixes import is_key
from typer.testing import CliRunner

from gpumix.cli import app
from gpumix.schema.errors import MachineError
from helpers.pages import PAGES, ROOT, blocks, commands, inline_commands, marked
from helpers.processes.harness import run_ranks

GROUP = typer.main.get_command(app)
SHOWN = [(block, words) for page in PAGES for block in blocks(page) for words in commands(block)]
INLINE = [(page, words) for page in PAGES for words in inline_commands(page)]
PLACEHOLDER = re.compile(r"\[.*\]|\.\.\.")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_THE_READER = {"train.py", "loop.py", "build"}
OF_SCRIPTS = {
    tuple(words[1:])
    for _, words in [*SHOWN, *INLINE]
    if words[0] == "python" and (ROOT / words[1]).is_file()
}
# Other programs. What a page does not run it says, with the reason.
BY_OTHERS = re.compile(r"(?m)^(?:sbatch|srun|kubectl|ssh|wandb|mlflow|docker|curl|git) ")


@cache
def help_of(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0, f"there is no `gpumix {' '.join(words)}`"
    return done.output


def options(words):
    return [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def check_gpumix(words):
    """`words` after `gpumix` can be run: the verb exists and takes these arguments and options."""
    verb, *rest = (word for word in words if not PLACEHOLDER.fullmatch(word))
    if verb == "launch":
        rest = of_launch(rest)
        check_scripts(rest[-1:])
    for option in options(rest):
        assert re.search(rf"(?<!\S){option}\b", help_of(verb)), f"{verb} has no {option}"
    GROUP.commands[verb].make_context(verb, rest)


def of_launch(words):
    """Without what is the program's own, and where a page sends what is printed."""
    ends = [n for n, word in enumerate(words) if word.endswith((".py", ".yaml"))]
    programs = [n for n in ends if not words[n - 1].startswith("--")]
    return words[: programs[0] + 1] if programs else words


def check_python(words):
    """A script that exists, this package, or a module."""
    if words[:2] == ["-m", "gpumix"]:
        check_gpumix(words[2:])
    elif words[:1] == ["-m"]:
        assert words[1] in OF_THE_READER or find_spec(words[1]), f"there is no {words[1]}"
    else:
        check_scripts(words[:1])


def check_scripts(words):
    for script in {word for word in words if word.endswith(".py")} - OF_THE_READER:
        assert (ROOT / script).is_file(), f"there is no {script}"


def check_torchrun(words):
    """The options are torchrun's own affair."""
    starts = (i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    check_python(words[next(starts, len(words)) :])


def check_pytest(words):
    """Tests that exist; of those that need a GPU some, and each word of `-k` in one's name."""
    chosen = words[words.index("-k") + 1].split() if "-k" in words else []
    for word in words:
        if word.startswith("tests/"):
            path = ROOT / word
            texts = [
                file.read_text(encoding="utf-8")
                for file in [path, *path.rglob("test_*.py")]
                if file.is_file()
            ]
            assert texts, f"there is no {word}"
            assert "gpu" not in words or any("mark.gpu" in text for text in texts)
            for name in set(chosen) - {"and", "or", "not"}:
                assert any(re.search(rf"def test_\w*{name}", text) for text in texts)


def check_make(words):
    targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(words) <= set(targets)


CHECKS = {
    "gpumix": check_gpumix,
    "make": check_make,
    "pytest": check_pytest,
    "python": check_python,
    "torchrun": check_torchrun,
}


@pytest.mark.parametrize(
    ("block", "words"), SHOWN, ids=[f"{block}-{' '.join(words)}" for block, words in SHOWN]
)
def test_a_command_in_a_block_has_a_verb_and_options_that_exist(block, words):
    CHECKS[words[0]](words[1:])


@pytest.mark.parametrize(
    ("page", "words"), INLINE, ids=[f"{page.name}-{' '.join(words)}" for page, words in INLINE]
)
def test_a_command_in_the_text_has_a_verb_and_options_that_exist(page, words):
    if words[0] != "gpumix":
        CHECKS[words[0]](words[1:])
        return
    settings = [words[n + 1] for n, word in enumerate(words[:-1]) if word == "--set"]
    for key in (setting.partition("=")[0] for setting in settings):
        assert is_key(key), f"a job has no {key}"
    verbs = [word for word in words[1:2] if not word.startswith("-")]
    if verbs == ["launch"]:
        words = [*words[:2], *of_launch(words[2:])]
    for option in options(words[1:]):
        assert option in help_of(*verbs)
    assert help_of(*verbs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_run_by_other_programs_says_why_it_is_not_run(page):
    assert not [str(b) for b in blocks(page) if BY_OTHERS.search(b.text) and not marked(b)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_extras_that_are_to_be_installed_are_there(page):
    text = page.read_text(encoding="utf-8")
    assert "gpumix[" not in text  # no index has it: extras are of a clone
    named = re.findall(r"\.\[([\w,]+)\]\"", text)
    assert {extra for some in named for extra in some.split(",")} <= EXTRAS.keys()


@pytest.mark.parametrize(
    ("page", "verbs"),
    [
        ("README.md", {"plan", "launch", "report"}),
        ("tutorial.md", {"check", "devices", "plan", "train", "top", "report", "simulate",
                         "inspect", "export", "doctor"}),
    ],
)  # fmt: skip
def test_pages_show_each_verb_that_one_needs(page, verbs):
    assert verbs <= {words[1] for block, words in SHOWN if block.page.name == page}


def test_scripts_take_what_pages_give_them():
    wrong = ("benchmarks/integrations.py", "--only", "overhead")
    (refused,) = run_ranks(refused_by_scripts, 1, sorted({*OF_SCRIPTS, wrong}))
    assert "invalid choice: 'overhead'" in refused.pop(wrong)
    assert refused == {}


class Taken(Exception):
    """A script has read its arguments, and goes no further."""


def refused_by_scripts(lines):
    """What scripts say of arguments that they do not take."""
    parse, refused = ArgumentParser.parse_args, {}

    def parsed(parser):
        parse(parser)
        raise Taken

    for words in lines:
        path = ROOT / words[0]
        if "parse_args()" not in path.read_text(encoding="utf-8"):  # it would run
            refused |= {words: "it has no parse_args()"} if words[1:] else {}
            continue
        told = io.StringIO()
        with (
            mock.patch.object(ArgumentParser, "parse_args", parsed),
            mock.patch.object(sys, "argv", [*words]),
            mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
            redirect_stderr(told),
        ):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except Taken:
                continue
            except MachineError as error:  # it needs what is not installed here
                assert "is not installed" in error.what
            except SystemExit:
                refused[words] = told.getvalue()
    return refused


def test_a_wrong_option_is_noticed():
    with pytest.raises(AssertionError, match="train has no --faster"):
        check_gpumix(["train", "job.yaml", "--faster"])


def test_a_missing_argument_is_noticed():
    with pytest.raises(Exception, match=r"[Mm]issing"):
        check_gpumix(["export", "runs/first"])
