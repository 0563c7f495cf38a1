"""Gradients of a rank before the reduction, which show which rank computes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Called with a bucket's name and gradients that are still this rank's own.
See = Callable[[str, Sequence[torch.Tensor]], None]
FINGERPRINT_PARTS = 16
ROW_NUMEL, SAMPLED_NUMEL = 4096, 512


class SampledGradientNorm:
    """Norm of a sample of the gradients, over all buckets of a step. It covers `SAMPLED_NUMEL`
    elements in each `ROW_NUMEL`, so that little memory is read, and all of tensors shorter than a
    row."""

    def __init__(self, device: torch.device) -> None:
        self._norms: list[torch.Tensor] = []
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of buffers, by identity
        self._nothing = torch.zeros((), device=device)

    def see(self, bucket: str, gradients: Sequence[torch.Tensor]) -> None:
        # By row: for a non-contiguous part, torch is as slow as for the full tensor.
        for one in gradients:
            if id(one) not in self._parts:
                self._parts[id(one)] = one, _sample_rows(one)
            self._norms.append(torch.linalg.vector_norm(self._parts[id(one)][1], dim=1))

    def take(self) -> torch.Tensor:
        """Return the norm of gradients seen since the last call."""
        norms, self._norms = self._norms, []
        return torch.linalg.vector_norm(torch.cat(norms)) if norms else self._nothing


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


def _sample_rows(gradient: torch.Tensor) -> torch.Tensor:
    rows = gradient.numel() // ROW_NUMEL
    return (
        gradient[: rows * ROW_NUMEL].view(rows, ROW_NUMEL)[:, :SAMPLED_NUMEL]
        if rows
        else gradient[None]
    )
