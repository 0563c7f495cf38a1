"""Pinned memory takes what is asked for, and is registered for as long as a tensor uses it."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

from gpumix.engine.offload.host_offload import allocate_on_host
from gpumix.hardware import runtime
from gpumix.hardware.host import pinned
from gpumix.hardware.host.pinned import allocate_pinned

SIZE = 3 * mmap.PAGESIZE + 5


class Driver:
    """What it has registered, by address; `refuses` to register more."""

    refuses = False

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.waits = 0

    def register(self, address: int, size_bytes: int) -> bool:
        assert address % mmap.PAGESIZE == 0
        if not self.refuses:
            self.registered[address] = size_bytes
        return not self.refuses

    def unregister(self, address: int) -> None:
        assert self.waits, "a copy could be on its way"
        del self.registered[address]

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(runtime, "register_pinned", driver.register)
    monkeypatch.setattr(runtime, "unregister_pinned", driver.unregister)
    monkeypatch.setattr(runtime, "synchronize", driver.synchronize)
    monkeypatch.setattr(runtime, "is_gpu", lambda device: torch.device(device).type == "meta")
    pinned._warn_refused.cache_clear()
    return driver


def test_no_more_is_taken_than_is_asked_for(driver):
    memory = allocate_pinned(SIZE)
    assert driver.registered == {memory.data_ptr(): SIZE}
    assert memory.nbytes == SIZE


def test_it_is_given_back_with_the_last_tensor_that_uses_it(driver):
    part = allocate_pinned(SIZE)[8:24].view(torch.float32)
    gc.collect()
    assert part.fill_(2.0).sum() == 8.0
    assert len(driver.registered) == 1
    del part
    gc.collect()
    assert not driver.registered


def test_a_files_bytes_are_that_memory(driver, tmp_path):
    file = tmp_path / "copy"
    file.write_bytes(bytes(SIZE))
    memory = allocate_pinned(SIZE, file)
    memory[-1] = 7
    assert file.read_bytes()[-1] == 7
    assert list(driver.registered.values()) == [SIZE]


def test_without_the_driver_it_is_ordinary_memory_and_that_is_told_once(driver, caplog):
    driver.refuses = True
    first, second = allocate_pinned(SIZE), allocate_pinned(SIZE)
    assert (first.fill_(1) + second.fill_(2)).sum() == 3 * SIZE
    del first, second
    gc.collect()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "registers no memory of the host" in caplog.text


def test_a_fork_gives_nothing_back(driver, monkeypatch):
    memory = allocate_pinned(SIZE)
    number = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: number + 1)
    del memory
    gc.collect()
    assert len(driver.registered) == 1


def test_nothing_takes_nothing(driver):
    assert allocate_pinned(0).numel() == 0
    assert not driver.registered


def test_memory_for_a_gpus_copies_is_pinned_and_for_a_cpus_it_is_not(driver):
    there = allocate_on_host(10, torch.bfloat16, torch.device("meta"))  # the fixture's GPU
    assert there.dtype == torch.bfloat16 and there.shape == (10,)
    assert list(driver.registered.values()) == [20]
    allocate_on_host(10, torch.bfloat16, torch.device("cpu"))
    assert len(driver.registered) == 1
