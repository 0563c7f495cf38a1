"""Stage `leftover`: tests that need a GPU, with the time that is left; a line for each test."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from common import BENCHMARKS
from proof.bench import Bench
from proof.lines import Bar
from proof.outcome import Outcome

ROOT = BENCHMARKS.parent
TESTS = "tests/engine/test_on_gpus.py"
ENDS_S = 5.0
OUTCOMES = ("passed", "failed", "error", "skipped")


def run(bench: Bench) -> Outcome:
    """In a rehearsal tests are only collected: CI runs them on its own device.

    Raises:
        RuntimeError: they cannot be collected.
    """
    how = ["--collect-only"] if bench.rehearses else ["--timeout", "60", "-k", "not share"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-x", "-rA", *how, TESTS]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, bench.left_s - ENDS_S))
        ended = True
    except subprocess.TimeoutExpired:
        process.kill()
        said, ended = process.communicate()[0], False
    print(said, file=sys.stderr)
    counts = dict.fromkeys(OUTCOMES, 0)
    for line in said.splitlines():
        word, _, name = line.partition(" ")
        if word.lower() in OUTCOMES and "::" in name:
            counts[word.lower()] += 1
            if not bench.rehearses:
                _tell(bench, word.lower(), name)
    collected = sum("::" in line for line in said.splitlines())
    code = process.returncode if ended else None
    bars = (Bar("exit_code", 0, 0, "gpu"), Bar("passed", least=1, judges="gpu"))
    if not bench.rehearses:
        return Outcome({**counts, "ended": ended, "exit_code": code}, bars)
    if code != 0 or not collected:
        raise RuntimeError(f"{TESTS}: {collected} tests collected, exit code {code}")
    return Outcome({"collected": collected}, bars)


def _tell(bench: Bench, word: str, name: str) -> None:
    test, _, why = name.partition(" - ")
    figures: dict[str, Any] = {"outcome": word}
    bad = word in ("failed", "error")
    bench.tell(test.rpartition("::")[2], figures, error=why or word if bad else "")
