"""Each mistake of `benchmarks/mistakes.py` gets one clear error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mistakes.py"


def test_every_mistake_gets_one_error_with_a_fix(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.pop("tracebacks") == 0
    assert done.returncode == 0 and len(set(figures.values())) == 1, done.stderr
    assert figures["mistakes"] >= 60
