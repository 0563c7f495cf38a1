"""What a CPU has instructions for, by the kernel's account of it."""

from __future__ import annotations

import sys

import pytest
import torch

from gpumix.hardware.cpu import bf16_in, cpu_has_bf16, short_of_cores_s, waited_s_in


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
    assert bf16_in(f"processor\t: 0\n{line}\nprocessor\t: 1\n") == has


def test_seconds_without_a_core():
    some = "some avg10=1.53 avg60=0.87 avg300=0.73 total=2500000"
    assert waited_s_in(f"{some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n") == 2.5
    assert waited_s_in("") == 0.0
    assert 0.0 <= short_of_cores_s() <= short_of_cores_s()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
@pytest.mark.skipif(not hasattr(torch.cpu, "_is_avx512_bf16_supported"), reason="not told")
def test_torch_says_the_same():
    its = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert cpu_has_bf16() or not its
