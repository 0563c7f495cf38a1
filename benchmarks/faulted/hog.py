"""Data of whose ranks one loses memory of its device to somebody else, from some step on.

What is taken stays taken: a run that starts again finds it so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.models.gpt2.modeling_gpt2 import GPT2Model

from faulted.text import Pieces, pieces

TAKEN = "taken"


def samples(folder: str, length: int, rank: int, step: int, taken_bytes: int) -> Pieces:
    """Bytes of real text; from the forward pass number `step` of this process on `rank` has so
    much less memory, after the first time from the first one on."""
    if taken_bytes and rank == (dist.get_rank() if dist.is_initialized() else 0):
        _take(Path(folder) / TAKEN, step, taken_bytes)
    return pieces(length)


def _take(told: Path, step: int, taken_bytes: int) -> None:
    passed, held = 0, []

    def goes_forward(module: nn.Module, inputs: Any) -> None:
        nonlocal passed
        if not isinstance(module, GPT2Model) or not module.training or held:
            return
        passed += 1
        if passed >= step or told.exists():
            told.touch()
            held.append(torch.empty(taken_bytes, dtype=torch.uint8))

    register_module_forward_pre_hook(goes_forward)
