"""`jobs.py`, which runs the command line, lies with the tests of `train`; profiles that are made up
lie with those of the planner."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("train", "planner"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
