"""Bytes that estimates let memory move outside of products, against torch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from gpumix.hardware.estimates.decoder_shapes import make_decoder
from gpumix.hardware.estimates.roofline import BACKWARD_MOVES, compute_moved_bytes

TOKENS, WIDTH = 512, 1024
CONFIGURATIONS = {
    "llama": {
        "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 2816, "vocab_size": 1000,
    },
    "gpt2": {
        "n_embd": WIDTH, "n_layer": 1, "n_head": 8, "n_positions": 1024, "vocab_size": 1000,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip
PRODUCTS = ("mm", "addmm", "bmm", "embedding")


class MovedBytes(TorchDispatchMode):
    """Counts the bytes of inputs and outputs of all operations that are no products or views."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        view = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        if not view and name not in (*PRODUCTS, "_unsafe_view", "detach"):
            tensors = (x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor))
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result


@pytest.mark.parametrize("kind", sorted(CONFIGURATIONS))
def test_a_block_moves_at_least_the_estimate_and_at_most_thrice(kind, monkeypatch):
    """One operation at a time moves most; kernels that do several at once move less."""
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda q, k, v, **_: q + k + v
    )  # a fused kernel
    sizes = CONFIGURATIONS[kind]
    config = AutoConfig.for_model(kind, **sizes, attn_implementation="sdpa")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        states = torch.empty(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        if kind == "llama":
            block = model.model.layers[0]
            rotary = model.model.rotary_emb(states, torch.arange(TOKENS)[None])
            arguments = {"position_embeddings": rotary}
        else:
            block, arguments = model.transformer.h[0], {}
        with MovedBytes() as moved:
            output = block(states, **arguments)
            output.backward(torch.empty_like(output))
    (estimated,) = make_decoder({"model_type": kind, **sizes}).model(TOKENS, "bf16", kind).kinds
    assert 1 < moved.bytes / ((1 + BACKWARD_MOVES) * compute_moved_bytes(estimated)) < 3
