"""Tiny models of many architectures with batches for them: what the engine must run unchanged.

Each has 2 or 3 blocks of width 32, those of `DEEP` have 8; random weights and no dropout. Batches
have samples of unequal length: labels are -100 behind a sample's end, so that means over different
parts have different counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 128
LENGTH = 12
WIDTH = 32
IGNORED = -100
DEPTH = 8

Batch = dict[str, Tensor]
MakeBatch = Callable[[int, torch.Generator], Batch]


@dataclass(frozen=True)
class Architecture:
    """A model with random weights, and what to feed it."""

    name: str
    factory: Callable[[], nn.Module]
    batch: MakeBatch


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a single process trains on: the model's own mean, or its sum by its count."""
    result = model(**batch)
    return result[0] / result[1] if isinstance(result, tuple) else result.loss


# -- batches ---------------------------------------------------------------------------------------


def _tokens(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (n, LENGTH), generator=generator)


def _inside(n: int, generator: torch.Generator) -> Tensor:
    """Which positions come before their sample's end; every sample has at least two."""
    lengths = torch.randint(2, LENGTH + 1, (n, 1), generator=generator)
    return torch.arange(LENGTH)[None] < lengths


def causal_lm(n: int, generator: torch.Generator) -> Batch:
    tokens, inside = _tokens(n, generator), _inside(n, generator)
    return {
        "input_ids": tokens,
        "attention_mask": inside.long(),
        "labels": tokens.masked_fill(~inside, IGNORED),
    }


def packed_lm(n: int, generator: torch.Generator) -> Batch:
    """Full samples without a mask, as packed text gives them."""
    tokens = _tokens(n, generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked_lm(n: int, generator: torch.Generator) -> Batch:
    tokens = _tokens(n, generator)
    hidden = torch.rand(n, LENGTH, generator=generator) < 0.3
    hidden[:, 0] = True
    return {
        "input_ids": tokens.masked_fill(hidden, 3),
        "labels": tokens.masked_fill(~hidden, IGNORED),
    }


def translation(n: int, generator: torch.Generator) -> Batch:
    inside = _inside(n, generator)
    return {
        "input_ids": _tokens(n, generator),
        "attention_mask": inside.long(),
        "labels": _tokens(n, generator).masked_fill(~_inside(n, generator), IGNORED),
    }


def speech(n: int, generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(n, 8, 32, generator=generator),
        "labels": _tokens(n, generator).masked_fill(~_inside(n, generator), IGNORED),
    }


def images(n: int, generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(n, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 10, (n,), generator=generator),
    }


def vectors(n: int, generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(n, LENGTH, WIDTH, generator=generator),
        "target": torch.randn(n, LENGTH, 4, generator=generator),
    }


# -- transformers ----------------------------------------------------------------------------------


_GLU = {"intermediate_size": 48}


def model_of(auto_class: str, config_class: str, **settings: Any) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        import transformers

        config = getattr(transformers, config_class)(**settings)
        return getattr(transformers, auto_class).from_config(config)

    return factory


def causal_model(config_class: str, **settings: Any) -> Callable[[], nn.Module]:
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return model_of("AutoModelForCausalLM", config_class, **(common | settings))


def gpt2(dropout: float = 0.0, **settings: Any) -> Callable[[], nn.Module]:
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return causal_model("GPT2Config", **(dropouts | settings))


def partly_frozen_gpt2() -> nn.Module:
    """Without gradients in its first block and in a norm of its second."""
    model = gpt2()()
    model.get_submodule("transformer.h.0").requires_grad_(False)
    model.get_submodule("transformer.h.1.ln_1").requires_grad_(False)
    return model


def llama(**settings: Any) -> Callable[[], nn.Module]:
    return causal_model("LlamaConfig", num_key_value_heads=2, **(_GLU | settings))


def qwen3(**settings: Any) -> Callable[[], nn.Module]:
    grouped = {"num_key_value_heads": 2, "head_dim": 8}
    return causal_model("Qwen3Config", **(grouped | _GLU | settings))


def bert(dropout: float = 0.0, layers: int = 3) -> Callable[[], nn.Module]:
    return model_of(
        "AutoModelForMaskedLM",
        "BertConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def t5(dropout: float = 0.0, layers: int = 2) -> Callable[[], nn.Module]:
    return model_of(
        "AutoModelForSeq2SeqLM",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=48,
        num_layers=layers,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )


_ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}


def bart(dropout: float = 0.0) -> Callable[[], nn.Module]:
    return model_of(
        "AutoModelForSeq2SeqLM",
        "BartConfig",
        **_ENCODER_DECODER,
        max_position_embeddings=32,
        dropout=dropout,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )


def whisper() -> Callable[[], nn.Module]:
    return model_of(
        "AutoModelForSpeechSeq2Seq",
        "WhisperConfig",
        **_ENCODER_DECODER,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def vit() -> Callable[[], nn.Module]:
    return model_of(
        "AutoModelForImageClassification",
        "ViTConfig",
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


# -- plain modules ---------------------------------------------------------------------------------


class Regression(nn.Module):
    """Blocks between two linear layers; returns (summed squared error, count)."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.error(x, target)

    def error(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        difference = self.leave(self.norm(x)) - target
        return (difference**2).sum(), torch.tensor(difference.numel())


class Block(nn.Module):
    """Pre-norm attention and MLP, written by hand."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(q, k, v)))
        return x + self.dropout(self.mlp(x))


class InOrder(Regression):
    """Calls its blocks in a given order."""

    def __init__(self, blocks: int, order: list[int]) -> None:
        super().__init__([Block() for _ in range(blocks)])
        self.order = order

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        for number in self.order:
            x = self.blocks[number](x)
        return self.error(x, target)


class NextToken(nn.Module):
    """A language model of three blocks; returns (summed loss, count)."""

    def __init__(self, block: Callable[[], nn.Module], *, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1].flatten(0, 1).float()
        loss = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
        return loss, torch.tensor(float(ids[:, 1:].numel()))


def same_everywhere(factory: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same values in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return factory()


def own_blocks() -> nn.Module:
    return Regression([Block() for _ in range(3)])


def torch_blocks() -> nn.Module:
    return Regression(
        [nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True) for _ in range(3)]
    )


# -- all -------------------------------------------------------------------------------------------


ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture("gpt2", gpt2(), causal_lm),
        Architecture("llama", llama(), causal_lm),
        Architecture(
            "qwen2", causal_model("Qwen2Config", num_key_value_heads=2, **_GLU), causal_lm
        ),
        Architecture("qwen3", qwen3(), causal_lm),
        Architecture(
            "mistral",
            causal_model("MistralConfig", num_key_value_heads=2, sliding_window=8, **_GLU),
            packed_lm,
        ),
        Architecture(
            "gemma2",
            causal_model(
                "Gemma2Config", num_key_value_heads=2, head_dim=8, sliding_window=8, **_GLU
            ),
            causal_lm,
        ),
        Architecture("phi3", causal_model("Phi3Config", num_key_value_heads=2, **_GLU), causal_lm),
        Architecture(
            "opt",
            causal_model("OPTConfig", ffn_dim=48, word_embed_proj_dim=WIDTH, dropout=0.0),
            causal_lm,
        ),
        Architecture(
            "bloom",
            causal_model(
                "BloomConfig", n_layer=3, n_head=4, hidden_dropout=0.0, attention_dropout=0.0
            ),
            causal_lm,
        ),
        Architecture(
            "gpt-neox",
            causal_model("GPTNeoXConfig", hidden_dropout=0.0, attention_dropout=0.0, **_GLU),
            packed_lm,
        ),
        Architecture(
            "mixtral",
            causal_model(
                "MixtralConfig",
                num_key_value_heads=2,
                num_local_experts=4,
                num_experts_per_tok=2,
                **_GLU,
            ),
            causal_lm,
        ),
        Architecture("bert", bert(), masked_lm),
        Architecture("vit", vit(), images),
        Architecture("t5", t5(), translation),
        Architecture("bart", bart(), translation),
        Architecture("whisper", whisper(), speech),
        Architecture("plain-torch-blocks", torch_blocks, vectors),
        Architecture("plain-own-blocks", own_blocks, vectors),
    )
}

DEEP: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture("gpt2-deep", gpt2(num_hidden_layers=DEPTH), causal_lm),
        Architecture("llama-deep", llama(num_hidden_layers=DEPTH), causal_lm),
        Architecture("qwen3-deep", qwen3(num_hidden_layers=DEPTH), causal_lm),
        Architecture("bert-deep", bert(layers=DEPTH), masked_lm),
        Architecture("t5-deep", t5(layers=DEPTH // 2), translation),
    )
}
"""With units enough for several stages on each rank; of T5 half of them are the encoder's."""
