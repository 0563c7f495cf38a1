"""A checkpoint goes through memory of the host, which is not the device's."""

from __future__ import annotations

from pathlib import Path

import torch

from gpumix.hardware.runtime import open_device
from gpumix.spec.cluster import DeviceClass
from gpumix.train.checkpoint_shards import Boxed, read, write
from gpumix.train.checkpoint_together import Together
from harness import run_ranks

CLASS = DeviceClass(name="small", accelerator="cpu", memory_bytes="64 MiB")
NUMEL = 2**20


def risen(folder: Path) -> tuple[int, int]:
    """Bytes by which the device's peak rises while this rank writes, and while it reads."""
    found = []
    with open_device(CLASS, 0) as runtime:
        buffer = torch.arange(2.0 * NUMEL)
        halves = {"a": buffer[:NUMEL].view(64, -1), "b": buffer[NUMEL:].view(64, -1)}
        boxed = {name: Boxed.whole(half) for name, half in halves.items()}
        together, index = Together(None), None
        for _ in range(2):
            runtime.reset_peak()
            before = runtime.current_bytes()
            if index is None:
                index = write(folder, {"model": boxed}, together)
            else:
                read(folder, index, {f"model.{name}": one for name, one in boxed.items()}, together)
            found.append(runtime.peak_bytes() - before)
    return found[0], found[1]


def test_neither_writing_nor_reading_takes_memory_of_the_device(tmp_path):
    [(written, was_read)] = run_ranks(risen, 1, tmp_path)
    assert max(written, was_read) < NUMEL  # a quarter of the smallest tensor
