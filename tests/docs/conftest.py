"""Helpers that lie with tests of other packages."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("cli", "train", "planner", "integrations"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
