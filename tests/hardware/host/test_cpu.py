"""What a CPU has instructions for, by the kernel's account of it; and how much of it is there."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from gpumix.hardware.host import cpu
from gpumix.hardware.host.cpu import (
    count_cores,
    get_threads_per_rank,
    has_bf16,
    has_bf16_flag,
    parse_pressure_s,
    read_core_pressure_s,
)


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("flags\t\t: fpu sse2 avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu sse2 avx512f", False),
        ("bugs\t\t: bf16", False),
        ("", False),
    ],
)
def test_instructions_for_bf16(line, has):
    assert has_bf16_flag(f"processor\t: 0\n{line}\nprocessor\t: 1\n") == has


def test_seconds_without_a_core():
    some = "some avg10=1.53 avg60=0.87 avg300=0.73 total=2500000"
    assert parse_pressure_s(f"{some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n") == 2.5
    assert parse_pressure_s("") == 0.0
    assert 0.0 <= read_core_pressure_s() <= read_core_pressure_s()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
@pytest.mark.skipif(not hasattr(torch.cpu, "_is_avx512_bf16_supported"), reason="not told")
def test_torch_says_the_same():
    its = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert has_bf16() or not its


@pytest.mark.parametrize("quotas", [[0.5], [], [1e6, 0.25]])
def test_the_quota_of_a_container_counts(monkeypatch, quotas):
    monkeypatch.setattr(cpu, "read_core_quotas", list)
    all_of_them = count_cores()
    monkeypatch.setattr(cpu, "read_core_quotas", lambda: quotas)
    assert count_cores() == min([all_of_them, *quotas])


def test_ranks_share_the_cores_that_this_process_may_use(monkeypatch):
    """Not all of the host's, as a scheduler leaves a job some of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(cpu, "read_core_quotas", list)
    assert [get_threads_per_rank(ranks) for ranks in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setattr(cpu, "read_core_quotas", lambda: [2.5])
    assert get_threads_per_rank(1) == 2
