"""Real text as samples for models of bytes."""

from __future__ import annotations

import torch

from common import TEXT

Pieces = list[dict[str, torch.Tensor]]


def pieces(length: int) -> Pieces:
    """So many bytes a sample; the text's end, which may be shorter, is left out."""
    text = b"".join(file.read_bytes() for file in sorted(TEXT.glob("*.py")))
    parts = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(length)
    return [{"input_ids": part, "labels": part} for part in parts[:-1]]
