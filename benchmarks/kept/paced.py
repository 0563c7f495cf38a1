"""A small model whose samples take a given time, as on a device that leaves its host idle, and a
record of who did which step when.

So other work on the host, or a second run, changes neither what a step takes nor what is compared.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gpumix.train.trainer import Trainer

VOCABULARY = 256
SAMPLE_S = 0.025
SAMPLES, LENGTH = 480, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.out(F.gelu(self.into(self.norm(x))))
        return y


class Paced(nn.Module):
    """1.2 million weights. Returns (summed loss, count)."""

    def __init__(self, width: int = 160, blocks: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        ends = time.monotonic() + SAMPLE_S * len(input_ids)
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        time.sleep(max(0.0, ends - time.monotonic()))
        return loss, torch.tensor(labels.numel())


def model() -> nn.Module:
    return Paced()


def tokens() -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=drawn)
    return [{"input_ids": row, "labels": row} for row in rows]


class Told:
    """Adds a line to `done-NUMBER.jsonl` for each step; `pid-NUMBER` is this process, and that
    which it was forked from."""

    def __init__(self, folder: Path, number: int) -> None:
        self._file = (folder / f"done-{number}.jsonl").open("a", buffering=1)
        written = folder / f"pid-{number}.new"
        written.write_text(f"{os.getpid()} {os.getppid()}")
        written.rename(folder / f"pid-{number}")

    def step(self, step: int, batches: float) -> None:
        """`batches`: that count since the run began, as parts of whole ones."""
        told = {"at": time.time(), "pid": os.getpid(), "step": step, "batches": batches}
        self._file.write(json.dumps(told) + "\n")


def samples(folder: str) -> list[dict[str, Tensor]]:
    """For ranks of gpumix, which tell of their steps."""
    told = Told(Path(folder), dist.get_rank() if dist.is_initialized() else 0)
    step = Trainer.issue_step

    def give_step(self: Trainer, *arguments: Any) -> Any:
        done = step(self, *arguments)
        told.step(self.steps.given, self.steps.given)
        return done

    Trainer.issue_step = give_step  # type: ignore[method-assign]
    return tokens()
