"""How many rows of logits a head makes at a time when its loss runs in chunks."""

from __future__ import annotations

# Each chunk reads and writes the weight's whole gradient: with fewer rows that takes longer than
# the matrix product.
LEAST_ROWS = 128
# A chunk's logits are at most this part of the weight's gradient, which is there anyway.
PART_OF_GRADIENT = 4


def rows_per_chunk(rows: int, *, vocabulary: int, width: int) -> int:
    """Rows (tokens) whose logits are alive at a time: a power of two, unless all fit in one chunk.

    As many as make the chunk's logits as large as the hidden states of all `rows`, or as a part of
    the gradient of the `width` x `vocabulary` weight, whichever is more: what the head must hold
    anyway is the measure of what it may take beside.
    """
    wanted = max(LEAST_ROWS, rows * width // vocabulary, width // PART_OF_GRADIENT)
    return max(1, min(rows, 1 << (wanted.bit_length() - 1)))


def chunk_bytes(
    rows: int, *, vocabulary: int, width: int, compute_bytes: int, gradient: bool = True
) -> int:
    """The most that one micro-batch's loss takes beside hidden states and gradients: a chunk's
    logits in the compute dtype and its logarithms of probabilities in fp32; with a gradient in
    another dtype than fp32 also the part of the weight's gradient that is being added."""
    logits = rows_per_chunk(rows, vocabulary=vocabulary, width=width) * vocabulary
    tile = logits * compute_bytes if gradient and compute_bytes < 4 else 0
    return logits * (compute_bytes + 4) + tile
