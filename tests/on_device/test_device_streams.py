"""Streams run behind, and a missing order between them gives a wrong number.

Each test has the right form and the form that lacks one call; which is wrong shows every time.
"""

from __future__ import annotations

import copy

import pytest
import torch

from cuda_device import set_lag

pytestmark = pytest.mark.gpu
SIZE = 1000
CPU_ONES = torch.ones(SIZE)


@pytest.mark.parametrize("right", [True, False])
def test_a_consumer_that_does_not_wait_reads_what_was_there(right):
    """The main stream uses what a side stream makes."""
    set_lag("side-late")
    side, made = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made += 3
    if right:
        torch.cuda.current_stream().wait_stream(side)
    assert float(made.sum()) == (3 * SIZE if right else 0)


@pytest.mark.parametrize("right", [True, False])
def test_a_side_stream_that_does_not_wait_reads_what_was_there(right):
    """A side stream uses what the main stream makes: copies to the host do."""
    set_lag("side-early")
    side, made = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    host = torch.zeros(SIZE, pin_memory=True)
    made += 3
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(made, non_blocking=True)
    side.synchronize()
    assert float(host.sum()) == (3 * SIZE if right else 0)


@pytest.mark.parametrize("right", [True, False])
def test_an_event_holds_back_later_work(right):
    set_lag("side-late")
    side, made = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda")
    with torch.cuda.stream(side):
        made.copy_(CPU_ONES.pin_memory(), non_blocking=True)
        ready = side.record_event()
    if right:
        torch.cuda.current_stream().wait_event(ready)
    assert float(made.sum()) == (SIZE if right else 0)


@pytest.mark.parametrize("right", [True, False])
def test_memory_in_use_by_another_stream_must_be_recorded(right):
    """A tensor goes while a side stream still reads it, and its memory is handed out again."""
    set_lag("side-late")
    side, host = torch.cuda.Stream(), torch.zeros(SIZE, pin_memory=True)
    given = torch.full((SIZE,), 3.0, device="cuda")
    address = given.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(given, non_blocking=True)
    if right:
        given.record_stream(side)
    del given
    next_one = torch.full((SIZE,), 7.0, device="cuda")
    assert (next_one.data_ptr() == address) is not right
    side.synchronize()
    assert float(host.sum()) == (3 if right else 7) * SIZE


def test_memory_that_was_recorded_comes_back():
    """Once the stream has come so far, the next allocation gets the memory."""
    set_lag("side-late")
    side, given = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda")
    address = given.data_ptr()
    with torch.cuda.stream(side):
        doubled = given * 2
    given.record_stream(side)
    del given
    side.synchronize()
    assert torch.empty(SIZE, device="cuda").data_ptr() == address
    del doubled


@pytest.mark.parametrize("right", [True, False])
def test_a_pinned_buffer_that_is_used_again_too_early(right):
    set_lag("side-late")
    side, there = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda")
    buffer = torch.full((SIZE,), 3.0).pin_memory()
    with torch.cuda.stream(side):
        there.copy_(buffer, non_blocking=True)
        sent = side.record_event()
    if right:
        sent.synchronize()
    buffer.fill_(7.0)
    torch.cuda.current_stream().wait_stream(side)
    assert float(there.sum()) == (3 if right else 7) * SIZE


@pytest.mark.parametrize("right", [True, False])
def test_a_copy_to_the_host_is_read_too_early(right):
    set_lag("side-early")
    made = torch.full((SIZE,), 3.0, device="cuda")
    host = torch.zeros(SIZE, pin_memory=True)
    host.copy_(made, non_blocking=True)
    copied = torch.cuda.current_stream().record_event()
    assert not copied.query()
    if right:
        copied.synchronize()
    assert float(host.sum()) == (3 * SIZE if right else 0)


def test_pinned_memory_waits_for_copies_before_it_is_handed_out_again():
    """Whoever drops a pinned tensor early is safe, as on CUDA; registered memory is not."""
    set_lag("side-late")
    side, there = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda")
    buffer = torch.full((SIZE,), 3.0).pin_memory()
    address = buffer.data_ptr()
    with torch.cuda.stream(side):
        there.copy_(buffer, non_blocking=True)
    del buffer
    other = torch.empty(SIZE, pin_memory=True)
    assert other.data_ptr() != address
    torch.cuda.current_stream().wait_stream(side)
    assert float(there.sum()) == 3 * SIZE
    again = [torch.empty(SIZE, pin_memory=True) for _ in range(3)]
    assert address in [one.data_ptr() for one in again]


def test_pageable_memory_is_read_at_once():
    """The driver copies it before the call returns."""
    set_lag("side-late")
    side, there = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda")
    buffer = torch.full((SIZE,), 3.0)
    with torch.cuda.stream(side):
        there.copy_(buffer, non_blocking=True)
    buffer.fill_(7.0)
    torch.cuda.current_stream().wait_stream(side)
    assert float(there.sum()) == 3 * SIZE


@pytest.mark.parametrize("lag", ["side-late", "side-early", "random:1", "random:2"])
def test_code_in_order_is_right_however_late_streams_are(lag):
    """Forward, backward and updates, with copies both ways on a stream of their own."""
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    batch = torch.randn(4, 3, 16)
    expected = _trained(copy.deepcopy(model), [batch] * 3)
    set_lag(lag)
    found = _trained(model.cuda(), [batch.pin_memory() for _ in range(3)])
    assert found == pytest.approx(expected, rel=1e-4)


def _trained(model, batches) -> list[float]:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    side = torch.cuda.Stream() if device.type == "cuda" else None
    losses = []
    for batch in batches:
        if side is not None:
            with torch.cuda.stream(side):
                batch = batch.to(device, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            batch.record_stream(torch.cuda.current_stream())
        loss = model(batch).square().mean() + model.linear1.weight.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def test_random_numbers_do_not_depend_on_how_late_a_stream_is():
    def drawn() -> list[float]:
        torch.cuda.manual_seed(3)
        numbers = [torch.rand(5, device="cuda"), torch.ones(5, device="cuda").bernoulli_(0.5)]
        return [value for one in numbers for value in one.tolist()]

    prompt = drawn()
    set_lag("side-early")
    assert drawn() == prompt


def test_events_tell_the_time_of_their_stream():
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    torch.cuda._sleep(20_000_000)
    ended.record()
    assert not ended.query()
    with pytest.raises(ValueError, match="completed"):
        begun.elapsed_time(ended)
    ended.synchronize()
    assert ended.query() and begun.elapsed_time(ended) >= 10


def test_streams_of_two_devices_are_ordered_by_events():
    set_lag("side-early")
    made = torch.full((SIZE,), 3.0, device="cuda:0")
    torch.cuda.current_stream(1).wait_event(torch.cuda.current_stream(0).record_event())
    assert float(made.to("cuda:1").sum()) == 3 * SIZE


def test_what_fails_on_the_device_shows_when_the_host_waits():
    set_lag("side-early")
    table, row = torch.zeros(3, 2, device="cuda"), torch.tensor([7], device="cuda")
    torch.nn.functional.embedding(row, table)
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.cuda.current_stream().synchronize()
