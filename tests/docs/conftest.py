"""Helpers that lie with the tests of the command line, of `train` and of the planner."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("cli", "train", "planner"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
