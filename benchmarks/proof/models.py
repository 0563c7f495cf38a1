"""The Llamas that the proof trains, made on the device by their own initialiser, and their cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compared.setting import SEED, Model


@dataclass(frozen=True)
class Llama(Model):
    """A Llama with its MLP's width and its key/value heads given."""

    mlp: int = 2048
    kv_heads: int = 12

    def build_on(self, device: torch.device, *, keep_dtype: bool = False) -> nn.Module:
        """The model in training mode: the same values at each call on one device.

        Args:
            keep_dtype: it stays in the default dtype; else it is in fp32.
        """
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(SEED)
        with torch.device(device):
            model = transformers.LlamaForCausalLM(self._llama())
        return model.train() if keep_dtype else model.float().train()

    @property
    def configuration(self) -> dict[str, Any]:
        """For a job's `model: {config: ...}`."""
        config: dict[str, Any] = self._llama().to_diff_dict()
        return {**config, "model_type": "llama"}

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward, attention not halved for its causal mask."""
        attention = 12 * self.layers * self.width * self.sequence
        return 6 * (self.parameters - self.vocabulary * self.width) + attention

    @property
    def parameters(self) -> int:
        kv_width = self.kv_heads * (self.width // self.heads)
        block = self.width * (2 * self.width + 2 * kv_width + 3 * self.mlp + 2)
        return 2 * self.vocabulary * self.width + self.layers * block + self.width

    def _llama(self) -> Any:
        config = super()._llama()
        config.intermediate_size = self.mlp
        config.num_key_value_heads = self.kv_heads
        config.tie_word_embeddings = False
        config.head_dim = self.width // self.heads
        return config


SMALL = Llama(width=768, layers=12, vocabulary=32_000, sequence=1024, mlp=2048, kv_heads=12)
TINY_LLAMA = Llama(width=2048, layers=22, vocabulary=32_000, sequence=2048, mlp=5632, kv_heads=4)
MIDDLE = Llama(width=1024, layers=24, vocabulary=32_000, sequence=1024, mlp=2816, kv_heads=4)
REHEARSED = Llama(width=128, layers=2, vocabulary=264, sequence=32, mlp=256, kv_heads=1)
