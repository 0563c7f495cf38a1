"""A spinner while a command is silent: lines printed meanwhile stand alone, above it;
and errors, in a terminal's width."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

from gpumix.train.console.terminal import wrap_error

PROGRAM = """
    import time
    from gpumix.train.console.terminal import get_stderr_console, show_waiting

    console = get_stderr_console()
    with show_waiting("reading"):
        with show_waiting("inner"):
            time.sleep(0.8)
        console.print("a line")
        time.sleep(0.3)
    console.print("after")
"""


def run_on_terminal(program: str, *arguments: str) -> str:
    """What a program writes to a terminal on stderr."""
    terminal, its_end = os.openpty()
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=its_end, env=env):
        os.close(its_end)
        found = b""
        while True:
            try:
                found += os.read(terminal, 4096)
            except OSError:  # the program has ended
                break
    os.close(terminal)
    return found.decode()


def test_lines_are_printed_above_a_spinner():
    shown = run_on_terminal(PROGRAM)
    assert "reading" in shown and "inner" not in shown
    rows = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", row) for row in re.split(r"[\r\n]+", shown)]
    assert "a line" in rows
    assert rows.index("a line") < max(n for n, row in enumerate(rows) if "reading" in row)
    assert rows[-2:] == ["after", ""]


def test_no_spinner_is_drawn_in_a_log_with_forced_colours():
    env = os.environ | {"FORCE_COLOR": "1"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.stderr.splitlines() == ["a line", "after"]


ERROR = """\
gpumix: job.yaml:3: 'model.factory' is code that would be run, 'toys:model'; nothing allows it
  why: it has NVIDIA's cards from Pascal on and the Tesla M40, AMD's Instinct from MI50 on
  fix: start a process per device: torchrun --nnodes N --nproc-per-node GPUS -m gpumix train a.yaml
  fix: go on with --resume, or write elsewhere: --set output_dir=runs/another, then run the same
  fix: leave it out to use the GPUs of this host, of course: `gpumix plan --cluster x` takes it
  fix: with the right packages there is no such problem any more: pip install "gpumix[trl,peft]"
  fix: give the folder: /somewhere/that/has/a/name/so/long/that-it-does-not/fit/into/a/row.json
"""
COPIED = (
    "torchrun --nnodes N --nproc-per-node GPUS -m gpumix train a.yaml",
    "--set output_dir=runs/another",
    "`gpumix plan --cluster x`",
    'pip install "gpumix[trl,peft]"',
    "/somewhere/that/has/a/name/so/long/that-it-does-not/fit/into/a/row.json",
)


@pytest.mark.parametrize("columns", [80, 72])
def test_errors_are_wrapped_around_what_is_copied(columns):
    shown = wrap_error(ERROR, columns)
    assert max(map(len, shown.splitlines())) <= max(columns, 7 + max(map(len, COPIED)))
    assert all(copied in shown for copied in COPIED)
    assert shown.split() == ERROR.split()
    more = [line for line in shown.splitlines()[1:] if line[2:6] not in ("why:", "fix:")]
    assert more and all(line.startswith("  ") for line in more)
    assert all(line.startswith(" " * 7) for line in more[1:])  # behind "why:" and "fix:"


def test_a_command_wraps_its_errors_on_a_terminal():
    shown = run_on_terminal("from gpumix.cli import main; main()", "plan", "--cluster", "rtx9")
    lines = shown.split("\r\n")
    assert len(lines) > 4 and max(map(len, lines)) <= 80, shown
