"""What a CPU has instructions for, by the kernel's account of it."""

from __future__ import annotations

import sys

import pytest
import torch

from gpumix.hardware.cpu import bf16_in, cpu_has_bf16


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


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
@pytest.mark.skipif(not hasattr(torch.cpu, "_is_avx512_bf16_supported"), reason="not told")
def test_torch_says_the_same():
    its = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert cpu_has_bf16() or not its
