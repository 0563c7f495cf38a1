"""Rows of logits per chunk of the head when cross-entropy is chunked."""

from __future__ import annotations

# Each chunk reads and writes the weight's whole gradient: with fewer rows, that takes longer than
# the matrix product.
MIN_CHUNK_ROWS = 128
# A chunk's logits are at most this part of the weight's gradient, which exists anyway.
GRADIENT_TO_LOGITS_RATIO = 4


# On a GPU, one pass over the weight's gradient takes as long as the products of many rows: about
# 270 on an H100, by its data sheet. A chunk may be larger there: as many rows as fit in this much
# memory, up to the number at which the pass takes a fifteenth of the time.
GPU_CHUNK_BYTES = 2**29
GPU_MAX_CHUNK_ROWS = 4096


def compute_chunk_rows(
    rows: int, *, vocabulary: int, width: int, on_gpu: bool = False, logit_bytes: int = 8
) -> int:
    """Return the rows (tokens) of logits per chunk: a power of two, unless all fit in one chunk.

    A chunk's logits may be as large as the hidden states of all `rows`, or as a part of the
    gradient of the `width` x `vocabulary` weight, whichever is more: memory needed anyway sets the
    scale of extra memory. On a GPU the minimum is the rows that fit in `GPU_CHUNK_BYTES`, up to
    `GPU_MAX_CHUNK_ROWS`.

    Args:
        logit_bytes: bytes of a chunk per logit; see `get_bytes_per_logit`.
    """
    wanted = max(MIN_CHUNK_ROWS, rows * width // vocabulary, width // GRADIENT_TO_LOGITS_RATIO)
    if on_gpu:
        wanted = max(wanted, min(GPU_MAX_CHUNK_ROWS, GPU_CHUNK_BYTES // (vocabulary * logit_bytes)))
    return max(1, min(rows, 1 << (wanted.bit_length() - 1)))


def get_bytes_per_logit(compute_bytes: int, *, gradient: bool = True, fused: bool = False) -> int:
    """Return the bytes of a chunk per logit: the logit in the compute dtype and, unless the loss is
    one fused kernel, its log-probability in fp32. With a gradient in a dtype other than fp32, add
    the tile of the weight's gradient being accumulated."""
    logarithm = 0 if fused else 4
    tile = compute_bytes if gradient and compute_bytes < 4 else 0
    return compute_bytes + logarithm + tile


def compute_chunk_bytes(
    rows: int,
    *,
    vocabulary: int,
    width: int,
    compute_bytes: int,
    on_gpu: bool = False,
) -> int:
    """Return the peak bytes of one micro-batch's loss, without hidden states and gradients."""
    logit_bytes = get_bytes_per_logit(compute_bytes, gradient=True)
    chunk = compute_chunk_rows(
        rows, vocabulary=vocabulary, width=width, on_gpu=on_gpu, logit_bytes=logit_bytes
    )
    return chunk * vocabulary * logit_bytes
