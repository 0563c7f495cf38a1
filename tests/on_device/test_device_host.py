"""What of a device the host notices: waits, the processes that it forks, which devices it sees."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import cuda_device
from helpers.processes.commands import environment, run
from helpers.processes.harness import run_ranks

pytestmark = pytest.mark.gpu
HERE = Path(__file__).name


def waits_of(act) -> list[int]:
    """The numbers of waits, by line of this file."""
    cuda_device.reset_host_waits()
    act()
    found = cuda_device.host_waits()
    assert all(HERE in place for place in found), found
    return sorted(found.values())


def test_each_wait_is_counted_at_its_line():
    one = torch.ones(3, device="cuda")

    def act() -> None:
        for _ in range(2):
            one.sum().item()
        one[0] = 3.5
        one.cpu()
        torch.cuda.synchronize()
        torch.nonzero(one)

    assert waits_of(act) == [1, 1, 1, 1, 2]


def test_what_does_not_wait_is_not_counted():
    one = torch.ones(3, device="cuda", requires_grad=True)
    pinned, event = torch.ones(3).pin_memory(), torch.cuda.Event()

    def act() -> None:
        (one * 2).sum().backward()
        pinned.copy_(one.detach(), non_blocking=True)
        one.detach().copy_(pinned, non_blocking=True)
        event.record()
        event.query()
        torch.cuda.current_stream().wait_event(event)
        one.detach().fill_(3.5)
        one.detach()[0:1].fill_(2.0)

    assert waits_of(act) == []


def test_a_wait_in_backward_is_counted_at_the_line_that_began_it():
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            assert threading.current_thread() is not threading.main_thread()
            return gradient * gradient.sum().item()

    one = torch.ones(3, device="cuda", requires_grad=True)
    assert waits_of(lambda: Looks.apply(one).sum().backward()) == [1]


def test_torch_warns_of_waits_or_refuses_them():
    one = torch.ones(3, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            one.sum().item()
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            one.cpu()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.get_sync_debug_mode() == 0


ASKS = """
import torch
print([torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())])
print(torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0)
"""


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA H100 80GB HBM3", "Tesla T4"]),
        ("1", ["Tesla T4"]),
        ("1,0", ["Tesla T4", "NVIDIA H100 80GB HBM3"]),
        ("", []),
        ("7,0", []),
    ],
)
def test_the_environment_chooses_devices(tmp_path, visible, names):
    env = environment(tmp_path) | {"GPUMIX_TEST_CUDA": "h100:2,t4:0.5"}
    env |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    file = tmp_path / "asks.py"
    file.write_text(ASKS)
    done = run([sys.executable, str(file)], folder=tmp_path, env=env, timeout_s=60)
    assert done.out.splitlines()[0] == str(names), done.err


def test_a_device_that_was_used_is_closed_to_forked_processes(tmp_path):
    """As CUDA's own; and the process that gpumix's ranks are forked from uses none."""
    file = tmp_path / "forks.py"
    file.write_text(
        "import os, torch\n"
        "torch.cuda.init()\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        torch.ones(1, device='cuda')\n"
        "    except RuntimeError as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = run(
        [sys.executable, str(file)], folder=tmp_path, env=environment(tmp_path), timeout_s=60
    )
    assert "Cannot re-initialize CUDA in forked subprocess" in done.out


def look() -> tuple[bool, bool, float]:
    used = torch.cuda._is_in_bad_fork(), torch.cuda.is_initialized()
    return *used, float(torch.ones(1, device="cuda"))


def test_what_ranks_are_forked_from_leaves_the_devices_alone():
    """Not even a count of devices: it opens the driver, and no rank could use a GPU after that."""
    assert run_ranks(look, 1) == [(False, False, 1.0)]
