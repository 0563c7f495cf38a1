"""The model of jobs that must give the same to the last bit each time."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from proof.models import Llama


def model(spec: dict[str, Any]) -> nn.Module:
    """A Llama whose process computes by deterministic algorithms from now on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    return Llama(**spec).build()
