"""Random tokens of a small vocabulary, as data of a job: a head of few rows takes little time."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from emulated.setting import SEED


class Tokens(TensorDataset):
    """Samples that are guessed from themselves."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        (tokens,) = super().__getitem__(index)
        return {"input_ids": tokens, "labels": tokens}


def samples(*, vocabulary: int, length: int, count: int = 512) -> Tokens:
    """So many samples."""
    generator = torch.Generator().manual_seed(SEED)
    return Tokens(torch.randint(0, vocabulary, (count, length), generator=generator))
