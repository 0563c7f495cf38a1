"""Bytes of CPU tensors are counted exactly, and refused beyond the cap as a GPU refuses them."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

from gpumix.hardware.memory_limit import is_out_of_memory, limit_memory


@pytest.fixture
def memory(no_garbage):
    limit = limit_memory(None)
    if not limit.exact:
        pytest.skip(f"bytes cannot be counted here: {limit.why_inexact}")
    limit.reset_peak()
    yield limit
    limit_memory(None)


@pytest.fixture
def cap(memory):
    """Allows `n` bytes more than are in use, on behalf of a device called 'small'."""

    def cap_at(n):
        limit_memory(memory.current_bytes + n, owner="emulated device 'small'")

    return cap_at


def test_current_and_peak_are_exact(memory):
    before = memory.current_bytes
    a = torch.empty(1000, dtype=torch.uint8)
    b = torch.empty(77)
    assert memory.current_bytes - before == 1000 + 4 * 77
    del a
    assert memory.current_bytes - before == 4 * 77
    assert memory.peak_bytes - before == 1000 + 4 * 77
    memory.reset_peak()
    assert memory.peak_bytes == memory.current_bytes
    del b
    assert memory.current_bytes == before


def test_the_peak_includes_what_an_operation_frees_again(memory):
    x = torch.ones(1000)
    memory.reset_peak()
    before = memory.current_bytes
    (x + x).add(x)
    assert memory.current_bytes == before
    assert memory.peak_bytes - before == 2 * 4000


def test_the_last_byte_of_the_cap_is_usable(cap):
    cap(1000)
    whole = torch.empty(1000, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, dtype=torch.uint8)
    del whole
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1001, dtype=torch.uint8)


def test_the_error_says_who_asked_what_and_what_is_in_use(memory, cap):
    cap(1000)
    limit = memory.current_bytes + 1000
    kept = torch.empty(600, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(500, dtype=torch.uint8)
    text = str(raised.value)
    assert "emulated device 'small' is out of memory: tried to allocate 500 bytes" in text
    assert f"{limit - 1000 + kept.numel()} bytes in use of a cap of {limit} bytes" in text


def test_the_process_goes_on_after_running_out(memory, cap):
    cap(10_000)
    memory.reset_peak()
    before = memory.current_bytes
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(10_001, dtype=torch.uint8)
        assert memory.current_bytes == before
        assert memory.peak_bytes == before, "what was refused is no peak"
    assert torch.ones(100).sum() == 100


def test_running_out_in_backward_is_caught_and_leaves_nothing_behind(memory, cap):
    layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    before = memory.current_bytes
    loss = layers(torch.ones(8, 64)).sum()
    cap(3 * 64 * 64 * 4)  # less than the four gradients
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    layers.zero_grad(set_to_none=True)
    assert memory.current_bytes == before
    limit_memory(None)
    layers(torch.ones(8, 64)).sum().backward()
    assert memory.current_bytes - before == 4 * 64 * 64 * 4


def test_a_storage_that_is_resized_is_counted(memory):
    x = torch.empty(1000)
    before = memory.current_bytes
    x.untyped_storage().resize_(0)
    assert before - memory.current_bytes == 4000
    x.untyped_storage().resize_(4000)
    assert memory.current_bytes == before


def test_views_and_empty_tensors_cost_nothing(memory):
    x = torch.empty(1000)
    before = memory.current_bytes
    views = [x[10:], x.view(10, 100), torch.empty(0), x.detach()]
    assert memory.current_bytes == before
    assert len(views) == 4


def test_optimizer_state_is_counted(memory):
    layer = nn.Linear(32, 32, bias=False)
    layer.weight.grad = torch.ones_like(layer.weight)
    before = memory.current_bytes
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    optimizer.step()
    step_counter = 4
    assert memory.current_bytes - before == 2 * 32 * 32 * 4 + step_counter


def test_threads_never_exceed_the_cap_together(memory, cap):
    cap(100 * 1000)
    kept, refused = [], []

    def allocate():
        for _ in range(60):
            try:
                kept.append(torch.empty(1000, dtype=torch.uint8))
            except torch.OutOfMemoryError:
                refused.append(1)

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(kept), len(refused)) == (100, 140)


def test_a_cap_below_what_is_in_use_refuses_only_what_is_new(memory):
    x = torch.ones(1000)
    limit_memory(1)
    x.add_(x)
    with pytest.raises(torch.OutOfMemoryError):
        x.sum()
    limit_memory(None)
    assert x.sum() == 2000


def test_oneDNN_and_matrix_products_work_on_counted_memory(memory):
    before = memory.current_bytes
    conv = nn.Conv2d(8, 8, 3)
    out = conv(torch.ones(2, 8, 16, 16))
    out.sum().backward()
    torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
    del conv, out
    assert memory.current_bytes == before


def test_a_forked_worker_has_no_cap(cap):
    cap(1000)
    child = os.fork()
    if child == 0:
        torch.empty(10_000)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(10_000)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_out_of_memory_is_recognised_however_it_is_worded(error, expected):
    assert is_out_of_memory(error) is expected
