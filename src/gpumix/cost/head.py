"""How many rows of logits a head makes at a time when its loss runs in chunks."""

from __future__ import annotations

# Each chunk reads and writes the weight's whole gradient: with fewer rows that takes longer than
# the matrix product.
LEAST_ROWS = 128
# A chunk's logits are at most this part of the weight's gradient, which is there anyway.
PART_OF_GRADIENT = 4


# On a GPU a pass over the weight's gradient takes as long as the products of many rows: on an H100,
# by its data sheet, of some 270. So there a chunk may be larger: as many rows as this much memory
# holds, but no more than leave that pass a fifteenth of the time.
GPU_CHUNK_BYTES = 2**29
GPU_MOST_ROWS = 4096


def rows_per_chunk(
    rows: int, *, vocabulary: int, width: int, on_gpu: bool = False, logit_bytes: int = 8
) -> int:
    """Rows (tokens) whose logits are alive at a time: a power of two, unless all fit in one chunk.

    As many as make the chunk's logits as large as the hidden states of all `rows`, or as a part of
    the gradient of the `width` x `vocabulary` weight, whichever is more: what the head must hold
    anyway is the measure of what it may take beside. On a GPU at least as many as fit in
    `GPU_CHUNK_BYTES`, up to `GPU_MOST_ROWS`.

    Args:
        logit_bytes: that a chunk takes for each of its logits: see `bytes_per_logit`.
    """
    wanted = max(LEAST_ROWS, rows * width // vocabulary, width // PART_OF_GRADIENT)
    if on_gpu:
        wanted = max(wanted, min(GPU_MOST_ROWS, GPU_CHUNK_BYTES // (vocabulary * logit_bytes)))
    return max(1, min(rows, 1 << (wanted.bit_length() - 1)))


def bytes_per_logit(compute_bytes: int, *, gradient: bool = True, fused: bool = False) -> int:
    """What a chunk takes for each of its logits: the logit in the compute dtype and, unless one
    kernel makes the loss, the logarithm of its probability in fp32; with a gradient in another
    dtype than fp32 also the part of the weight's gradient that is being added."""
    logarithm = 0 if fused else 4
    tile = compute_bytes if gradient and compute_bytes < 4 else 0
    return compute_bytes + logarithm + tile


def chunk_bytes(
    rows: int,
    *,
    vocabulary: int,
    width: int,
    compute_bytes: int,
    gradient: bool = True,
    on_gpu: bool = False,
) -> int:
    """The most that one micro-batch's loss takes beside hidden states and gradients, of which it is
    known whether it wants a gradient."""
    logit_bytes = bytes_per_logit(compute_bytes, gradient=gradient)
    chunk = rows_per_chunk(
        rows, vocabulary=vocabulary, width=width, on_gpu=on_gpu, logit_bytes=logit_bytes
    )
    return chunk * vocabulary * logit_bytes
