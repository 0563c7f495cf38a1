"""Newton-Schulz iteration that orthogonalizes a matrix, for Muon."""

from __future__ import annotations

import torch

Coefficients = tuple[float, float, float]
# From https://kellerjordan.github.io/posts/muon/: steepest at zero, so that few steps are enough.
JORDAN_COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrix: torch.Tensor, coefficients: Coefficients, *, steps: int, eps: float
) -> torch.Tensor:
    """Approximate U V^T of the matrix U S V^T by Newton-Schulz iterations in bf16. Uses the
    operations of torch's own Muon in order, so that results are bitwise equal."""
    a, b, c = coefficients
    x = matrix.bfloat16()
    tall = matrix.size(0) > matrix.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)  # no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
