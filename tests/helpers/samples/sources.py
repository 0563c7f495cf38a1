"""What several tests of the data need: a source to watch, a tokenizer file, packed bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpumix.data.core.source import Source
from gpumix.data.core.token_file import PackedText
from gpumix.data.core.tokenizer import ByteTokenizer
from gpumix.data.text.files import pack_text
from gpumix.schema.job.job import DataSpec


class Numbers(Source):
    """Sample k holds k; logs what was asked, and fails at the samples in `broken`."""

    def __init__(self, n: int, fingerprint: str = "numbers") -> None:
        self.n = n
        self.mark = fingerprint
        self.asked: list[list[int]] = []
        self.broken: set[int] = set()

    @property
    def fingerprint(self) -> str:
        return self.mark

    def __len__(self) -> int:
        return self.n

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        if self.broken & set(indices.tolist()):
            raise OSError("the disk is gone")
        self.asked.append(indices.tolist())
        return {"k": torch.from_numpy(indices), "pair": torch.zeros(len(indices), 2)}


def write_tokenizer(path: Path, *special: str, words: str = "the cat sat on mat") -> Path:
    """A word-level tokenizer file: <unk> 0, then `special`, then the words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {name: i for i, name in enumerate(["<unk>", *special, *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def spec(*paths: Path, **more: str) -> DataSpec:
    return DataSpec(text=paths, **more)


def pack(tmp_path: Path, *paths: Path, length: int = 4, **more: str) -> PackedText:
    return pack_text(spec(*paths, **more), ByteTokenizer(), length, tmp_path / "cache")


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
