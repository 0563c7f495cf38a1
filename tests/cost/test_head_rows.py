"""How many rows of logits are made at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.memory_layout.chunk_rows import (
    GPU_CHUNK_BYTES,
    compute_chunk_bytes,
    compute_chunk_rows,
    get_bytes_per_logit,
)

SIZES = {"vocabulary": st.integers(2, 300_000), "width": st.integers(1, 20_000)}


@given(rows=st.integers(1, 1_000_000), on_gpu=st.booleans(), **SIZES)
def test_a_power_of_two_or_all(rows, on_gpu, vocabulary, width):
    chunk = compute_chunk_rows(rows, vocabulary=vocabulary, width=width, on_gpu=on_gpu)
    assert 1 <= chunk <= rows
    assert chunk == rows or chunk.bit_count() == 1


@given(rows=st.integers(128, 1_000_000), **SIZES)
def test_a_chunk_is_no_larger_than_what_is_there_anyway(rows, vocabulary, width):
    chunk = compute_chunk_rows(rows, vocabulary=vocabulary, width=width)
    assert chunk <= 128 or chunk * vocabulary <= max(rows * width, width * vocabulary / 4)


@pytest.mark.parametrize(
    "rows, vocabulary, width, chunk",
    [(512, 32_768, 256, 128), (16_384, 128_256, 4096, 1024), (100, 50_257, 768, 100)],
)
def test_usual_sizes(rows, vocabulary, width, chunk):
    assert compute_chunk_rows(rows, vocabulary=vocabulary, width=width) == chunk


def test_a_large_vocabulary_takes_far_less_than_its_logits():
    whole = 16_384 * 128_256 * (2 + 4 + 4)  # logits in bf16, in fp32, and their logarithms
    assert compute_chunk_bytes(16_384, vocabulary=128_256, width=4096, compute_bytes=2) < whole / 15


@given(rows=st.integers(1, 1_000_000), fused=st.booleans(), **SIZES)
def test_a_gpu_takes_more_rows_within_its_budget(rows, fused, vocabulary, width):
    anywhere = compute_chunk_rows(rows, vocabulary=vocabulary, width=width)
    size = get_bytes_per_logit(2, fused=fused)
    chunk = compute_chunk_rows(
        rows, vocabulary=vocabulary, width=width, on_gpu=True, logit_bytes=size
    )
    assert chunk == anywhere or chunk * vocabulary * size <= GPU_CHUNK_BYTES
    assert chunk >= anywhere


@pytest.mark.parametrize(
    "vocabulary, width, fused, chunk",
    [(32_000, 2048, True, 4096), (128_256, 4096, True, 1024), (128_256, 2048, False, 512)],
)
def test_usual_sizes_on_a_gpu(vocabulary, width, fused, chunk):
    """Of bf16; 512 rows, which are bound by memory, only where nothing larger fits."""
    size = get_bytes_per_logit(2, fused=fused)
    sizes = {"vocabulary": vocabulary, "width": width, "logit_bytes": size}
    assert compute_chunk_rows(16_384, on_gpu=True, **sizes) == chunk
