"""Memory of the device and pinned memory of the host are counted and limited as CUDA's are."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from gpumix.hardware.memory_limit.limit import is_out_of_memory

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture(autouse=True)
def _emptied():
    torch.ones(1, device="cuda")  # opens the device
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def bytes_on(device: int, mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device=f"cuda:{device}")


def test_each_device_counts_its_own():
    torch.cuda.reset_peak_memory_stats(1)
    before = torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)
    held = bytes_on(1, 4)
    del held
    held = bytes_on(1, 2)
    assert torch.cuda.memory_allocated(0) == before[0]
    assert torch.cuda.memory_allocated(1) == before[1] + 2 * MIB
    assert torch.cuda.max_memory_allocated(1) == before[1] + 4 * MIB
    assert torch.cuda.memory_reserved(1) >= 20 * MIB  # a segment
    free, total = torch.cuda.mem_get_info(1)
    assert total - free >= torch.cuda.memory_reserved(1)
    del held


def test_results_of_kernels_are_counted():
    one = torch.ones(MIB, device="cuda")
    before = torch.cuda.memory_allocated()
    two = one.softmax(0)
    assert torch.cuda.memory_allocated() == before + 4 * MIB
    del two
    assert torch.cuda.memory_allocated() == before


def test_a_limit_is_kept_and_told_in_the_words_of_cuda():
    total = torch.cuda.mem_get_info(0)[1]
    torch.cuda.set_per_process_memory_fraction(100 * MIB / total)
    held = [bytes_on(0, 20) for _ in range(4)]
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate 40.00 MiB. GPU 0 has"
    ) as e:
        bytes_on(0, 40)
    assert is_out_of_memory(e.value)
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    held.clear()
    assert bytes_on(0, 90).is_cuda  # the cache is given back for it
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1


def test_the_memory_of_the_device_ends():
    total = torch.cuda.mem_get_info(0)[1]
    with pytest.raises(torch.OutOfMemoryError, match="total capacity"):
        bytes_on(0, total // MIB)


def test_pinned_memory_takes_powers_of_two():
    torch.cuda.memory.reset_peak_host_memory_stats()
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    held = torch.empty(5 * MIB + 1, dtype=torch.uint8, pin_memory=True)
    assert held.is_pinned() and held[100:].is_pinned()
    assert torch.cuda.host_memory_stats()["active_bytes.current"] == before + 8 * MIB
    assert not torch.empty(3).is_pinned()
    assert not torch.empty(3, device="cuda").is_pinned()
    assert torch.ones(3).pin_memory().tolist() == [1, 1, 1]


def test_plain_memory_can_be_registered():
    runtime, plain = torch.cuda.cudart(), torch.from_numpy(np.zeros(MIB, np.uint8))
    torch.cuda.check_error(runtime.cudaHostRegister(plain.data_ptr(), MIB, 0))
    assert plain.is_pinned()
    with pytest.raises(RuntimeError, match="already mapped"):
        torch.cuda.check_error(runtime.cudaHostRegister(plain.data_ptr(), MIB, 0))
    torch.cuda.check_error(runtime.cudaHostUnregister(plain.data_ptr()))
    assert not plain.is_pinned()


def test_tensors_of_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.layer_norm(torch.ones(2, device="cuda"), (2,), torch.ones(2))
