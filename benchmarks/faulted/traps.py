"""Data whose ranks come to harm where it is written in files, and tell which samples they used.

A trap is a file `trap-*.json` in a folder: of which rank, in which of the steps that it
does after a start, at which place, and with which signal, or `HANG`. A rank takes the traps of its
own when it opens its data; one that has gone off is renamed, so it goes off once in all starts.
After each step a rank adds a line to `used-RANK.jsonl`: the step and its samples. `pid-RANK` is its
process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import AdamW
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from faulted.places import BEFORE_STEPS, HANG
from faulted.text import Pieces, pieces
from gpumix.engine.comm.communicator import Communicator
from gpumix.train.checkpoint import checkpointer, content
from gpumix.train.checkpoint.host_copy import HostCopy
from gpumix.train.trainer import Trainer

# Places that are passed in some steps only, or before the first.
ANY_STEP = ("save", *BEFORE_STEPS)


@dataclass(frozen=True)
class Trap:
    file: Path
    step: int
    place: str
    after: int  # how often the place is passed before, in that step
    signal: int


class Traps:
    """Those of this rank. `passes` is called wherever one could be."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._traps: list[Trap] = []
        for file in sorted(folder.glob("trap-*.json")):
            told = json.loads(file.read_text())
            if told.pop("rank") == rank:
                self._traps.append(Trap(file, **told))
        self._start = _number_of_start(folder / f"starts-{rank}")
        self._step = 0
        self._passed: dict[str, int] = {}
        self._rank = rank
        self._used = (folder / f"used-{rank}.jsonl").open("a", buffering=1)
        (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def begins_step(self) -> None:
        self._step += 1
        self._passed.clear()

    def ended_step(self, trainer: Trainer) -> None:
        told = {
            "start": self._start,
            "step": trainer.steps.given,
            "rank": self._rank,
            "at": time.time(),
            "samples": trainer.loader.last_indices.tolist(),
        }
        self._used.write(json.dumps(told) + "\n")

    def passes(self, place: str) -> None:
        before = self._passed.get(place, 0)
        self._passed[place] = before + 1
        for trap in self._traps:
            there = trap.place == place and (place in ANY_STEP or trap.step == self._step)
            if there and trap.after == before:
                self._go_off(trap)

    def _go_off(self, trap: Trap) -> None:
        self._traps.remove(trap)
        gone = trap.file.with_suffix(".gone")
        told = {"signal": trap.signal, "place": trap.place, "at": time.time()}
        gone.write_text(json.dumps(told))
        trap.file.unlink()
        if trap.signal == HANG:
            time.sleep(3600.0)  # it is ended before
        os.kill(os.getpid(), trap.signal)


def _number_of_start(file: Path) -> int:
    """One more than any rank has had. Collective."""
    had = int(file.read_text()) if file.exists() else 0
    number = torch.tensor(had + 1)
    if dist.is_initialized():
        dist.all_reduce(number, dist.ReduceOp.MAX)
    file.write_text(str(int(number)))
    return int(number)


def samples(folder: str, length: int) -> Pieces:
    """Bytes of real text; whoever reads it sets the traps in `folder`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    traps = Traps(Path(folder), rank)
    _set(traps)
    traps.passes("begin")
    return pieces(length)


def _set(traps: Traps) -> None:
    def goes_forward(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, GPT2Block) and module.training:
            traps.passes("forward")

    register_module_forward_pre_hook(goes_forward)
    step = Trainer.issue_step

    def give_step(self: Trainer, *arguments: Any) -> Any:
        traps.begins_step()
        done = step(self, *arguments)
        traps.ended_step(self)
        return done

    Trainer.issue_step = give_step  # type: ignore[method-assign]
    for name in ("reduce", "start_all_reduce"):  # where gradients are divided, and where not
        _before(traps, Communicator, name, "reduction")
    _before(traps, torch.autograd, "backward", "backward")
    _before(traps, AdamW, "step", "optimizer")
    _before(traps, HostCopy, "fill", "copy")
    _before(traps, checkpointer, "write", "save")
    _before(traps, content, "restore", "restore")


def _before(traps: Traps, owner: Any, name: str, place: str) -> None:
    function: Callable[..., Any] = getattr(owner, name)

    def trapped(*arguments: Any, **named: Any) -> Any:
        traps.passes(place)
        return function(*arguments, **named)

    setattr(owner, name, trapped)
