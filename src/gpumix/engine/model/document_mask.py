"""Attention masks for documents packed into a sample.

Most causal models of `transformers` separate documents themselves, by `position_ids` that restart
with each document; their own mask also handles windows and the attention implementation. For other
models, a mask is made here. `train.checks.packed_documents` tests whether it works with a model.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

POSITIONS, MASK = "position_ids", "attention_mask"


def make_document_mask(model: Any, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return an `attention_mask` [samples, 1, L, L] if positions mark documents and the model needs
    a mask; else an empty dict."""
    if POSITIONS not in batch or MASK in batch or _is_mask_harmful(model.config):
        return {}
    both_ways = getattr(model.loss_function, "__name__", "") == "ForMaskedLMLoss"
    decoder: nn.Module = getattr(model, model.base_model_prefix, model)
    kind: Any = type(decoder)
    if not both_ways and _is_masking_documents(kind):
        return {}
    document = (batch[POSITIONS] == 0).cumsum(-1)
    seen = document[:, None, :, None] == document[:, None, None, :]
    if not both_ways:
        seen = seen.tril()
    if getattr(model.config, "_attn_implementation", "") != "eager":
        return {MASK: seen}
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return {MASK: hidden.masked_fill(~seen, torch.finfo(dtype).min)}


def _is_mask_harmful(config: Any) -> bool:
    """Return whether a mask would do harm, because of attention windows or an encoder's mask."""
    kinds = getattr(config, "layer_types", None) or ()
    windows = getattr(config, "sliding_window", None) or any("sliding" in kind for kind in kinds)
    return bool(windows or getattr(config, "is_encoder_decoder", False))


@cache
def _is_masking_documents(kind: type[nn.Module]) -> bool:
    """Return whether a model makes its mask from positions, by code of its decoder or of itself.
    True if no code can be read, and for attention by distance (ALiBi), which needs no mask."""
    codes = [_get_forward_source(kind)]
    modules = vars(inspect.getmodule(kind) or kind).values()
    decoders = [m for m in modules if inspect.isclass(m) and m.__name__.endswith("Decoder")]
    codes += [_get_forward_source(decoder) for decoder in decoders]
    if not any(codes) or any("alibi" in code for code in codes):
        return True
    return any(
        _is_mask_from_positions(node) for code in codes for node in ast.walk(ast.parse(code))
    )


def _get_forward_source(kind: type[Any]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
    except (OSError, TypeError):
        return ""


def _is_mask_from_positions(node: ast.AST) -> bool:
    """Match `create_..._mask(..., position_ids=...)` or a dictionary of its arguments."""
    if isinstance(node, ast.Call):
        return "mask" in ast.unparse(node.func) and any(k.arg == POSITIONS for k in node.keywords)
    if isinstance(node, ast.Dict):
        keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        return {POSITIONS, MASK} <= keys
    return False
