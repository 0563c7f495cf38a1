"""What tests of trackers share: tiny jobs, and the records of a run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "train"))  # jobs.py and toys.py
