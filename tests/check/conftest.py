"""`jobs.py`, which writes jobs and runs the command line, lies with the tests of `train`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "train"))
