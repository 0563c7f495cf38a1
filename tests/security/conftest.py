"""Commands of verbs lie with the tests of `cli`, profiles that are made up with the planner's."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("cli", "train", "planner"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
