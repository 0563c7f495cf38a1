"""The reference pages say what the code says."""

from __future__ import annotations

import os
import sys

from pages import ROOT

from commands import run


def test_the_reference_pages_are_up_to_date():
    """If not: `python docs/generate.py`."""
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = run(command, folder=ROOT, env=os.environ, timeout_s=200)
    assert done.code == 0, done.err
