"""Tensor-parallel plans: styles of a model's modules, by `transformers`, or given here for
architectures without a plan.

A plan maps patterns of names to styles (`engine.tensor_parallel.parallelize`). In a pattern, `*`
matches one part of a name, and `**` any number of parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from gpumix.schema.errors import InputError

_BERT = {
    "**.attention.self.query": "colwise",
    "**.attention.self.key": "colwise",
    "**.attention.self.value": "colwise",
    "**.attention.output.dense": "rowwise",
    "**.layer.*.intermediate.dense": "colwise",
    "**.layer.*.output.dense": "rowwise",
}
_GPT2 = {
    "**.attn.c_attn": "packed_colwise_3",
    "**.attn.split_size": "divided",
    "**.attn.c_proj": "rowwise",
    "**.mlp.c_fc": "colwise",
    "**.mlp.c_proj": "rowwise",
    "**.wte": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}
_T5 = {
    f"**.{attention}.{name}": style
    for attention in ("SelfAttention", "EncDecAttention")
    for name, style in {
        "q": "colwise",
        "k": "colwise",
        "v": "colwise",
        "o": "rowwise",
        "n_heads": "divided",
        "relative_attention_bias": "embedding_colwise",
    }.items()
} | {
    "**.SelfAttention": "position_bias",
    "**.EncDecAttention": "position_bias",
    "**.DenseReluDense.wi": "colwise",
    "**.DenseReluDense.wi_0": "colwise",
    "**.DenseReluDense.wi_1": "colwise",
    "**.DenseReluDense.wo": "rowwise",
}
PLANS_BY_MODEL_TYPE: dict[str, dict[str, str]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "electra": _BERT,
    "gpt2": _GPT2,
    "t5": _T5,
    "mt5": _T5,
}
"""Plans by `model_type`, for models without a plan of their own."""


def resolve_tensor_plan(model: nn.Module, given: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the styles of a model, by pattern.

    Args:
        given: the user's plan in place of the model's own: names of styles, or torch's
            `ColwiseParallel` and `RowwiseParallel`.

    Raises:
        InputError: no plan exists for this model, or a pattern of `given` fits nothing, or a style
            of torch's has an option that is not followed.
    """
    if given:
        found = {pattern: _normalize_style(pattern, style) for pattern, style in given.items()}
        _refuse_unused(model, found)
        return found
    # `transformers`: with prefixes, and with additions by the classes of heads.
    own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if own:
        return dict(own)
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    if kind not in PLANS_BY_MODEL_TYPE:
        raise InputError(
            f"nothing says how a {type(model).__name__} is divided over the ranks of a "
            "tensor-parallel group",
            code="tensor-plan-missing",
            fix="give a plan, such as `tensor_plan: {'blocks.*.up': colwise, 'blocks.*.down': "
            "rowwise}`, or use no tensor parallelism",
        )
    return dict(PLANS_BY_MODEL_TYPE[kind])


def find_style(name: str, plan: Mapping[str, str]) -> str | None:
    """Return the style of the first pattern that fits a name."""
    return next((style for pattern, style in plan.items() if _is_match(pattern, name)), None)


def _normalize_style(pattern: str, style: Any) -> str:
    if isinstance(style, str):
        return style
    from gpumix.engine.tensor_parallel.torch_styles import (
        translate_style,  # takes half a second, and is rarely needed
    )

    return translate_style(pattern, style)


def _refuse_unused(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Raise an InputError for a pattern that fits nothing: its intended modules would stay whole,
    next to divided modules."""
    modules = [(name, module) for name, module in model.named_modules() if name]
    for pattern, style in plan.items():
        names = [name for name, _ in modules]
        if style == "divided":
            names += [f"{name}.{key}" for name, module in modules for key in vars(module)]
        if not any(_is_match(pattern, name) for name in names):
            layers = [name for name, module in modules if isinstance(module, nn.Linear)]
            raise InputError(
                f"pattern '{pattern}' of the tensor plan fits no module of the model",
                code="tensor-pattern-unmatched",
                why=f"linear layers of a {type(model).__name__} are {', '.join(layers[:6])}"
                + (", ..." if len(layers) > 6 else ""),
                fix="mend it, or leave it out; `*` stands for one part of a name, `**` for any "
                "number of them",
            )


def _is_match(pattern: str, name: str) -> bool:
    parts = re.split(r"(\*\*\.|\*)", pattern)
    stands_for = {"**.": r"(?:.*\.)?", "*": r"[^.]+"}
    return re.fullmatch("".join(stands_for.get(p, re.escape(p)) for p in parts), name) is not None
