"""Pinned memory takes what is asked for, and is registered for as long as a tensor uses it."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import subprocess
import sys

import pytest
import torch

from gpumix.engine.offload.host_offload import allocate_on_host
from gpumix.hardware import runtime
from gpumix.hardware.host import pinned
from gpumix.hardware.host.pinned import allocate_pinned
from gpumix.hardware.host.shared_segment import create_segment, map_segment
from gpumix.schema.errors import MachineError
from helpers.errors import raises

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


def test_shared_parameters_are_not_left_to_ordinary_memory(driver):
    """As on a kernel that lets a process lock no memory: copies would hold up each block."""
    driver.refuses = True
    with create_segment(SIZE) as place:
        with raises(MachineError, code="host-memory-not-registered") as caught:
            map_segment(place, SIZE, pinned=True)
        assert map_segment(place, SIZE, pinned=False).nbytes == SIZE
    assert "ulimit -l unlimited" in caught.value.fix and "locked memory" in caught.value.why


SMALL_SHM = """
from gpumix.hardware.host.shared_segment import create_segment
from gpumix.schema.errors import MachineError
with create_segment(2**20, named=True):
    pass
try:
    create_segment(2**23, named=True).__enter__()
except MachineError as error:
    print(error)
"""


def test_a_dev_shm_that_is_too_small_is_told_with_the_command_that_mends_it():
    script = 'mount -t tmpfs -o size=4M tmpfs /dev/shm && df /dev/shm >&2 && exec "$0" -c "$1"'
    own_mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*own_mounts, "true"]).returncode:
        pytest.skip("this machine gives no mounts of its own")
    told = subprocess.run(
        [*own_mounts, "sh", "-c", script, sys.executable, SMALL_SHM],
        capture_output=True,
        text=True,
    )
    assert "8.0 MiB of memory cannot be shared between the devices" in told.stdout, told
    assert "No space left on device" in told.stdout
    assert "docker run --shm-size" in told.stdout
