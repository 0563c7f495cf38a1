"""A checkpoint goes through memory of the host, which is not the device's."""

from __future__ import annotations

from pathlib import Path

import torch

from gpumix.hardware.device import open_device
from gpumix.hardware.memory_limit import limit_memory
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.train.checkpoint.checkpointer import Checkpointer
from gpumix.train.checkpoint.collective_errors import CollectiveActions
from gpumix.train.checkpoint.dcp_storage import BoxedTensor, read_boxes, write_boxes
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import batches, engine_alone

CLASS = DeviceClass(name="small", accelerator="cpu", memory_bytes="64 MiB")
NUMEL = 2**20


def risen(folder: Path) -> tuple[int, int]:
    """Bytes by which the device's peak rises while this rank writes, and while it reads."""
    found = []
    with open_device(CLASS, 0) as runtime:
        buffer = torch.arange(2.0 * NUMEL)
        halves = {"a": buffer[:NUMEL].view(64, -1), "b": buffer[NUMEL:].view(64, -1)}
        boxed = {name: BoxedTensor.whole(half) for name, half in halves.items()}
        together, index = CollectiveActions(None), None
        for _ in range(2):
            runtime.reset_peak()
            before = runtime.current_bytes()
            if index is None:
                index, _ = write_boxes(folder, {"model": boxed}, together)
            else:
                read_boxes(
                    folder, index, {f"model.{name}": one for name, one in boxed.items()}, together
                )
            found.append(runtime.peak_bytes() - before)
    return found[0], found[1]


def test_neither_writing_nor_reading_takes_memory_of_the_device(tmp_path):
    [(written, was_read)] = run_ranks(risen, 1, tmp_path)
    assert max(written, was_read) < NUMEL  # a quarter of the smallest tensor


def kept_on_device(folder: Path) -> tuple[int, int]:
    """By how much the device is fuller when a checkpoint is loaded into an engine whose state is on
    the host, and the bytes of that state."""
    memory, gpt2 = limit_memory(None), ARCHITECTURES["gpt2"]
    for settings in ({}, {"on_host": (0,)}):
        engine = engine_alone(gpt2.factory, 2, 1, zero_stage=2, **settings)
        optimizer = torch.optim.AdamW(engine.parameters())
        checkpointer = Checkpointer(folder, keep=1, group=None)
        if not settings:
            engine.step(next(batches(gpt2, 2, 1)))
            optimizer.step()
            checkpointer.save(1, engine, optimizer, cursor={}, extra={})
    before = memory.current_bytes
    checkpointer.load(engine, optimizer)
    return memory.current_bytes - before, 2 * sum(p.nbytes for p in engine.parameters())


def test_state_on_the_host_is_loaded_into_the_hosts_memory(tmp_path):
    [(risen, state)] = run_ranks(kept_on_device, 1, tmp_path)
    assert risen < 0.05 * state
