"""`jobs.py` lies with the tests of `train`. Tiny models are fastest on one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "train"))
torch.set_num_threads(1)
