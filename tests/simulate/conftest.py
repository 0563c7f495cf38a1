"""The synthetic profiles and plans of the tests of `planner` and `cost` serve here too."""

import sys
from pathlib import Path

for folder in ("planner", "cost", "train"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
