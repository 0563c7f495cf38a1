"""A spinner while a command is silent: lines printed meanwhile stand alone, above it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

PROGRAM = """
    import time
    from gpumix.train.run_log.terminal import get_stderr_console, show_waiting

    console = get_stderr_console()
    with show_waiting("reading"):
        with show_waiting("inner"):
            time.sleep(0.8)
        console.print("a line")
        time.sleep(0.3)
    console.print("after")
"""


def run_on_terminal(program: str) -> str:
    """What a program writes to a terminal on stderr."""
    terminal, its_end = os.openpty()
    command = [sys.executable, "-c", textwrap.dedent(program)]
    env = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=its_end, env=env) as process:
        os.close(its_end)
        found = b""
        while True:
            try:
                found += os.read(terminal, 4096)
            except OSError:  # the program has ended
                break
    os.close(terminal)
    assert process.returncode == 0, found
    return found.decode()


def test_lines_are_printed_above_a_spinner():
    shown = run_on_terminal(PROGRAM)
    assert "reading" in shown and "inner" not in shown
    rows = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", row) for row in re.split(r"[\r\n]+", shown)]
    assert "a line" in rows
    assert rows.index("a line") < max(n for n, row in enumerate(rows) if "reading" in row)
    assert rows[-2:] == ["after", ""]
