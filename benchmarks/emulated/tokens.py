"""Random tokens of a small vocabulary, as data of a job: a head of few rows takes little time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from emulated.setting import SEED


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Samples that are guessed from themselves. They are kept outside of torch's memory, which is
    that of an emulated device."""

    def __init__(self, tokens: npt.NDArray[np.int64]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor(self._tokens[index])
        return {"input_ids": tokens, "labels": tokens}


def samples(*, vocabulary: int, length: int, count: int = 512) -> Tokens:
    """So many samples."""
    return Tokens(np.random.default_rng(SEED).integers(0, vocabulary, (count, length)))
