"""The reference pages say what the code says."""

from __future__ import annotations

import subprocess
import sys

from pages import ROOT


def test_the_reference_pages_are_up_to_date():
    """If not: `python docs/generate.py`."""
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
