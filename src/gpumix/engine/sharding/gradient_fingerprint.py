"""Gradients of a rank before the reduction, which show which rank computes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Called with a bucket's name and gradients that are still this rank's own.
See = Callable[[str, Sequence[torch.Tensor]], None]
FINGERPRINT_PARTS = 16


class GradientFingerprints:
    """A few numbers of each bucket's gradients, equal for equal gradients: norm and sums of parts.
    Gradients of a bucket seen several times belong to a single sample, and add up."""

    def __init__(self) -> None:
        self._seen: dict[str, torch.Tensor] = {}

    def see(self, bucket: str, gradients: Sequence[torch.Tensor]) -> None:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        sums = [
            part.sum(dtype=torch.float64) for g in gradients for part in g.chunk(FINGERPRINT_PARTS)
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        seen = torch.stack([norm, *sums])
        self._seen[bucket] = self._seen[bucket] + seen if bucket in self._seen else seen

    def by_bucket(self, samples: int = 1) -> dict[str, list[float]]:
        """Return the numbers by bucket, averaged over `samples`. The norm is first."""
        return {bucket: (seen / samples).tolist() for bucket, seen in self._seen.items()}
