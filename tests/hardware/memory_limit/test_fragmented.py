"""Memory in pieces is told apart from memory that is full, by the words of CUDA's allocator."""

from __future__ import annotations

import pytest
import torch

from gpumix.hardware.memory_limit import is_fragmented, is_out_of_memory

MIB = 2**20
END = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF="
    "expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
# As people have met them; from torch 2.2 on only the variable and the address have changed.
FULL = (
    "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 1 has a total capacity of 93.02 GiB of "
    "which 1.18 GiB is free. Process 2752205 has 91.82 GiB memory in use. Of the allocated memory "
    "90.63 GiB is allocated by PyTorch, and 120.54 MiB is reserved by PyTorch but unallocated."
    + END,
    "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 47.53 GiB "
    "of which 16.88 MiB is free. Process 3652628 has 47.51 GiB memory in use. Of the allocated "
    "memory 47.14 GiB is allocated by PyTorch, and 57.79 MiB is reserved by PyTorch but "
    "unallocated." + END,
    "CUDA out of memory. Tried to allocate 19.68 GiB. GPU 0 has a total capacity of 23.68 GiB of "
    "which 11.88 GiB is free. Including non-PyTorch memory, this process has 11.79 GiB memory in "
    "use. Of the allocated memory 11.44 GiB is allocated by PyTorch, and 43.59 MiB is reserved by "
    "PyTorch but unallocated." + END,
    "CUDA out of memory. Tried to allocate 130206.04 GiB. GPU 0 has a total capacity of 23.56 GiB "
    "of which 16.57 GiB is free. Including non-PyTorch memory, this process has 6.97 GiB memory in "
    "use. Of the allocated memory 5.45 GiB is allocated by PyTorch, and 1.17 GiB is reserved by "
    "PyTorch but unallocated." + END,
)  # fmt: skip
IN_PIECES = (
    "CUDA out of memory. Tried to allocate 764.00 MiB. GPU 0 has a total capacity of 47.37 GiB of "
    "which 442.88 MiB is free. Including non-PyTorch memory, this process has 46.90 GiB memory in "
    "use. Of the allocated memory 42.40 GiB is allocated by PyTorch, and 3.24 GiB is reserved by "
    "PyTorch but unallocated." + END,
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of "
    "which 0 bytes is free. 7.50 GiB allowed; Of the allocated memory 7.10 GiB is allocated by "
    "PyTorch, with 68.00 MiB allocated in private pools (e.g., CUDA Graphs), and 412.90 MiB is "
    "reserved by PyTorch but unallocated."
    + END,
    "CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has a total capacity of 8.00 GiB of "
    "which 0 bytes is free. Of the allocated memory 7.10 GiB is allocated by PyTorch, and 1.50 KiB "
    "is reserved by PyTorch but unallocated."
    + END,
)  # fmt: skip
OTHERS = (
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "NCCL error in: ProcessGroupNCCL.cpp:1275, an cuda error, Cuda failure 2 'out of memory'",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 8000000000000 bytes. Error code 12 (Cannot allocate memory)",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [*((text, False) for text in (*FULL, *OTHERS)), *((text, True) for text in IN_PIECES)],
)
def test_what_was_asked_for_is_idle_or_is_not(text, expected):
    error = RuntimeError(text) if text in OTHERS else torch.OutOfMemoryError(text)
    assert is_out_of_memory(error)
    assert is_fragmented(error) is expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_says_so_too():
    """Of pieces that share segments of 20 MiB half are given back: no segment is free."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1024 * MIB / total)
    try:
        pieces = [_on_gpu(4) for _ in range(200)]
        with pytest.raises(torch.OutOfMemoryError) as full:
            _on_gpu(600)
        del pieces[1::2]
        with pytest.raises(torch.OutOfMemoryError) as in_pieces:
            _on_gpu(300)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not is_fragmented(full.value)
    assert is_fragmented(in_pieces.value)


def _on_gpu(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
