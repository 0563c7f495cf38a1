"""Two scripts for the doctor: one that is sound, one that reads each loss and copies from memory
that is not pinned."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH, LAYERS, ROWS, MICRO_STEPS = 1024, 8, 8192, 4  # 8.4 million parameters
STEPS = 100_000  # the doctor ends a script long before


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(_width(), _width()), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(_device())


def _is_tiny() -> bool:
    return _device().type != "cuda" or "GPU_PROOF_TINY" in os.environ


def _width() -> int:
    return 64 if _is_tiny() else WIDTH


def _batches(*, pinned: bool) -> Iterator[Tensor]:
    rows = 32 if _is_tiny() else ROWS
    ready = [torch.randn(rows, _width()) for _ in range(8)]
    loader = DataLoader(ready, batch_size=None, pin_memory=pinned)  # type: ignore[arg-type]
    return itertools.chain.from_iterable(itertools.repeat(loader))


def _loss(model: nn.Module, rows: Tensor) -> Tensor:
    with torch.autocast(_device().type, torch.bfloat16):
        loss: Tensor = (model(rows) - rows).square().mean()
    return loss


def sound() -> None:
    """Nothing is wrong with it."""
    model, device = _model(), _device()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = _batches(pinned=device.type == "cuda")
    for _ in range(STEPS):
        for _ in range(MICRO_STEPS):
            rows = next(batches).to(device, non_blocking=True)
            _loss(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()


def sick() -> None:
    """The host waits in each micro-step, for a copy and for a value."""
    model, device = _model(), _device()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches, total = _batches(pinned=False), 0.0
    for _ in range(STEPS):
        for _ in range(MICRO_STEPS):
            rows = next(batches).to(device)  # fault: copies
            loss = _loss(model, rows)
            loss.backward()
            total += loss.item()  # fault: syncs
        optimizer.step()
        optimizer.zero_grad()
