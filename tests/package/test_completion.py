"""Shells complete verbs and options: what typer installs, called as a shell calls it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("gpumix")
BASH = shutil.which("bash")

pytestmark = pytest.mark.skipif(not COMMAND.exists(), reason="gpumix is not installed as a command")


def bash(line: str, **variables: str) -> str:
    if BASH is None:
        pytest.skip("there is no bash")
    path = f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "TERM": "dumb"} | variables
    done = subprocess.run(
        [
            BASH,
            "--norc",
            "-c",
            f"{line}; exit $?",
        ],  # with two commands bash stays: it is looked for
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bash_is_shown_its_completion():
    shown = bash("gpumix --show-completion")
    assert "complete -o default -F _gpumix_completion gpumix" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [("gpumix tra", ["train"]), ("gpumix re", ["report"]), ("gpumix train --res", ["--resume"])],
)
def test_what_is_begun_is_completed(words, expected):
    last = str(len(words.split()) - 1)
    answer = bash("gpumix", _GPUMIX_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=last)
    assert answer.split() == expected
