"""What a rank has of the gradients before they are summed with those of others: who computes wrong
can be told by that, and afterwards no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Of a bucket, and gradients that are still this rank's own.
See = Callable[[str, Sequence[torch.Tensor]], None]
PARTS = 16
ROW, SEEN = 4096, 512


class OwnNorm:
    """The norm of a part of them, over all buckets of a step: of `SEEN` elements in each `ROW`, so
    that little memory is read; all of what is shorter than a row."""

    def __init__(self, device: torch.device) -> None:
        self._norms: list[torch.Tensor] = []
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of buffers, by identity
        self._nothing = torch.zeros((), device=device)

    def see(self, bucket: str, gradients: Sequence[torch.Tensor]) -> None:
        # By row: of a part that is not in one piece torch is as slow as of the whole.
        for one in gradients:
            if id(one) not in self._parts:
                self._parts[id(one)] = one, _part(one)
            self._norms.append(torch.linalg.vector_norm(self._parts[id(one)][1], dim=1))

    def take(self) -> torch.Tensor:
        """That of what was seen since the last time."""
        norms, self._norms = self._norms, []
        return torch.linalg.vector_norm(torch.cat(norms)) if norms else self._nothing


class Fingerprints:
    """A few numbers of each bucket's gradients, which are alike where these are: their norm, and
    the sums of their parts. What is seen of a bucket several times is of the same sample, and adds
    up."""

    def __init__(self) -> None:
        self._seen: dict[str, torch.Tensor] = {}

    def see(self, bucket: str, gradients: Sequence[torch.Tensor]) -> None:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        sums = [part.sum(dtype=torch.float64) for g in gradients for part in g.chunk(PARTS)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        seen = torch.stack([norm, *sums])
        self._seen[bucket] = self._seen[bucket] + seen if bucket in self._seen else seen

    def by_bucket(self, samples: int = 1) -> dict[str, list[float]]:
        """Of one sample, if so many were seen. The norm comes first."""
        return {bucket: (seen / samples).tolist() for bucket, seen in self._seen.items()}


def _part(gradient: torch.Tensor) -> torch.Tensor:
    rows = gradient.numel() // ROW
    return gradient[: rows * ROW].view(rows, ROW)[:, :SEEN] if rows else gradient[None]
