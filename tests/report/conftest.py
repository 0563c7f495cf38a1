"""Jobs are those of the tests of training, profiles those of the verbs that decide."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("train", "planner", "cli"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
