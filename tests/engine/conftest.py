"""Tiny models are fastest on one thread, and the same on every machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
