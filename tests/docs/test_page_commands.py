"""Every command that the pages show exists, with the options that they show."""

from __future__ import annotations

import re
import tomllib
from functools import cache

import pytest
import typer
from pages import PAGES, ROOT, blocks, commands, inline_commands, marked
from typer.testing import CliRunner

from gpumix.cli import app

GROUP = typer.main.get_command(app)
SHOWN = [(block, words) for page in PAGES for block in blocks(page) for words in commands(block)]
INLINE = [(page, words) for page in PAGES for words in inline_commands(page)]
PLACEHOLDER = re.compile(r"\[.*\]|\.\.\.")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_THE_READER = {"train.py", "loop.py"}
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
    """A script that exists, or this package."""
    if words[:2] == ["-m", "gpumix"]:
        check_gpumix(words[2:])
    else:
        check_scripts(words[:1])


def check_scripts(words):
    for script in {word for word in words if word.endswith(".py")} - OF_THE_READER:
        assert (ROOT / script).is_file(), f"there is no {script}"


def check_torchrun(words):
    """The options are torchrun's own affair."""
    start = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    check_python(words[start:])


def check_make(words):
    targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(words) <= set(targets)


CHECKS = {
    "gpumix": check_gpumix,
    "make": check_make,
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
    named = re.findall(r"(?:gpumix|\.)\[([\w,]+)\]\"", page.read_text(encoding="utf-8"))
    assert {extra for some in named for extra in some.split(",")} <= EXTRAS.keys()


def test_the_readme_shows_each_verb_that_one_needs():
    shown = {words[1] for block, words in SHOWN if block.page.name == "README.md"}
    assert {"devices", "plan", "train", "simulate", "export"} <= shown


def test_a_wrong_option_is_noticed():
    with pytest.raises(AssertionError, match="train has no --faster"):
        check_gpumix(["train", "job.yaml", "--faster"])


def test_a_missing_argument_is_noticed():
    with pytest.raises(Exception, match=r"[Mm]issing"):
        check_gpumix(["export", "runs/first"])
